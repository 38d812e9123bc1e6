"""Small words of the language that a config decides: a window that is null, an empty list, a rope of another type."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import dump, expected, prompt, reference, tiny_config

from flexgen.assets import root
from flexgen.contract.configs import broken_fence, merged
from flexgen.errors import ConfigError
from flexgen.ir.resolve import resolve
from flexgen.render.build import write
from flexgen.render.render import render
from flexgen.runtime.loading.checkpoint import CheckpointError
from flexgen.runtime.loading.model import Model
from flexgen.spec.diagnostics import SpecError
from flexgen.spec.load import parse_spec
from flexgen.verify.harness import Harness


def changed(spec: str, *changes: tuple[str, str]) -> str:
    text = (root("specs") / f"{spec}.yaml").read_text()
    for before, after in changes:
        assert before in text
        text = text.replace(before, after, 1)
    return text


def built(text: str, folder):
    write(folder, render(resolve(parse_spec(text, "changed.yaml"))))
    return folder


def messages(text: str) -> str:
    with pytest.raises(SpecError) as refused:
        resolve(parse_spec(text, "changed.yaml"))
    return str(refused.value)


NULL_WINDOW = ("  window: sliding_window or 0\n", "  window: sliding_window or none\n")


@pytest.mark.parametrize("window", [None, 8])
def test_a_window_that_is_null_sees_all(window, tmp_path):
    torch.set_num_threads(1)
    package = built(changed("qwen3_moe", NULL_WINDOW), tmp_path / "qwen3_moe")
    assert 'self.window = config.int_or_none("sliding_window")' in (package / "walker.py").read_text()
    slides = {"use_sliding_window": True, "sliding_window": window}
    # the class turns a null window off itself: every layer is full for it
    oracle = reference(tiny_config("qwen3_moe", **(slides if window else {})))
    oracle.save_pretrained(tmp_path / "file")
    config = {**tiny_config("qwen3_moe"), **slides}
    dump(config, tmp_path / "file")
    model = Model.load(tmp_path / "file", dtype="float32", device="cpu", generated=package)
    assert model.dims.window == window and set(model.dims.kinds) == {"sparse_sliding", "dense_sliding"}
    got = Harness(model, page_size=8).feed({0: prompt(30)})[0]
    assert (got - expected(oracle, prompt(30))).abs().max() < 1e-4


def test_none_stands_where_nothing_is_needed_and_last():
    assert "may be none where a number is needed" in messages(changed("qwen3_moe", NULL_WINDOW, ("size: size, act", "size: window, act")))
    assert "nothing is tried after `none`" in messages(changed("qwen3_moe", (NULL_WINDOW[0], "  window: sliding_window or none or 3\n")))
    assert "may be none" in messages(changed("qwen3_moe", NULL_WINDOW, ("  size: inter", "  more: window + 1\n  size: inter")))


def test_a_fence_of_an_empty_list():
    assert broken_fence({"a": []}, {"a": []}) is None and broken_fence({"a": []}, {"a": [None, []]}) is None
    assert broken_fence({"a": [1]}, {"a": []}) == "a is [1], and must be []"
    text = changed("qwen3_moe", ("  require: {hidden_act: silu}", "  require: {hidden_act: silu, mlp_only_layers: []}"))
    assert "`mlp_only_layers` of `tiny` is a list, which `require` rules out" in messages(text)
    resolve(parse_spec(text.replace("mlp_only_layers: [1]", "mlp_only_layers: []\n  decoder_sparse_step: 2"), "changed.yaml"))


def test_tiny_holds_fields_without_effect_and_ignored_ones():
    resolve(parse_spec(changed("qwen3_moe", ("tiny:\n", "tiny:\n  bos_token_id: 1\n  max_window_layers: 2\n")), "changed.yaml"))
    assert "`tiny` has `colour`" in messages(changed("qwen3_moe", ("tiny:\n", "tiny:\n  colour: 1\n")))


def test_defaults_are_those_of_their_own_rope_type():
    defaults = {"rope": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 2.0}}
    plain = {"rope": {"rope_type": "default", "rope_theta": 1.0}}
    assert merged(plain, defaults) == plain
    assert merged({"rope": {"rope_theta": 1.0}}, defaults) == {"rope": {"rope_theta": 1.0}}
    assert merged({"rope": {"rope_type": "yarn"}}, defaults) == defaults
    assert merged({"rope": {"rope_type": "yarn"}}, {"rope": {"rope_theta": 2.0}})["rope"]["rope_theta"] == 2.0


def test_a_number_under_another_name_is_pointed_at(tmp_path):
    text = changed("qwen3_moe", ("experts: num_local_experts or num_experts", "experts: num_experts"))
    package = built(text, tmp_path / "qwen3_moe")
    config = {**tiny_config("qwen3_moe", num_experts=...), "num_local_experts": 8}
    folder = dump({key: value for key, value in config.items() if value is not ...}, tmp_path / "file")
    with pytest.raises(ConfigError, match=r"lacks num_experts.* has num_local_experts.* `num_experts or num_local_experts`"):
        Model.load(folder, device="cpu", load_format="dummy", generated=package)


def test_what_says_where_is_rounded_must_say_something():
    assert "`tables` has no effect" in messages(changed("cohere2", ("compute: fp32, tables: model", "tables: model")))
    no_sum = ("{sum: [[attention], [mlp]]}]", "attention, mlp]")
    assert "`in_turn` has no effect: the branch ends with no `sum`" in messages(changed("cohere2", no_sum))
    stated = ("{like: rms, gain: none}", "{like: rms, gain: none, cast: after}")
    assert "`cast` has no effect: there is no weight" in messages(changed("llama4", stated))


def without(folder, names):
    """A saved model whose file lacks some tensors."""
    file = folder / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if name not in names}, file, metadata={"format": "pt"})


@pytest.mark.parametrize("letters", ["k", "qv", "qkvo"])
def test_each_of_q_k_v_and_o_has_a_bias_by_itself(letters, tmp_path):
    """transformers' Qwen 2 with biases of 0 is one without them."""
    oracle = reference(tiny_config("qwen2"))
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if name.endswith("_proj.bias") and name.rpartition("_proj")[0][-1] not in letters:
                parameter.zero_()
    oracle.save_pretrained(tmp_path / "file")
    without(tmp_path / "file", [name for name, tensor in oracle.state_dict().items() if name.endswith("_proj.bias") and not tensor.any()])
    if letters == "qkvo":  # Qwen 2 has none of o
        package = built(changed("qwen2", (", o_bias: false", "")), tmp_path / "qwen2")
        with pytest.raises(CheckpointError, match=r"self_attn\.o_proj\.bias"):
            Model.load(tmp_path / "file", dtype="float32", device="cpu", generated=package)
        return
    own = "".join(f", {letter}_bias: true" for letter in letters)
    package = built(changed("qwen2", ("bias: true, o_bias: false", own.removeprefix(", "))), tmp_path / "qwen2")
    model = Model.load(tmp_path / "file", dtype="float32", device="cpu", generated=package)
    got = Harness(model, page_size=8).feed({0: prompt(30)})[0]
    assert (got - expected(oracle, prompt(30))).abs().max() < 1e-4


def test_values_are_no_wider_than_keys(tmp_path):
    dump({**tiny_config("mimo_v2_flash"), "v_head_dim": 25}, tmp_path)
    with pytest.raises(ConfigError, match=r"attention\.full has values of width 25, which must be at least 1 and at most its head_dim, 24"):
        Model.load(tmp_path, dtype="float32", device="cpu", load_format="dummy")


def test_words_of_attention_that_do_not_go_together():
    wide = ("head_dim: head_dim, rope: rope, bias: true", "head_dim: head_dim, value_dim: head_dim, rope: rope, bias: true")
    assert "`value_dim` has no effect: it is `head_dim`" in messages(changed("qwen2", wide))
    assert "`k_bias` has no effect: it is what `bias` says" in messages(changed("qwen2", ("o_bias: false", "o_bias: false, k_bias: true")))
    clamped = ("o_bias: false", "o_bias: false, clip_when: after_norms")
    assert "`clip_when` has no effect: nothing is clamped" in messages(changed("qwen2", clamped))
    packed = ("packed: rows", "packed: rows, k_bias: true")
    assert "a bias that part of a packed module has" in messages(changed("phi3", packed))
