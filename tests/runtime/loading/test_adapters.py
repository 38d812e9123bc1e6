"""Merged adapters: every family, every source, PEFT's own forward as the measure, the pristine weights untouched."""

from __future__ import annotations

import pytest
import torch
from runtime.loading.adapters import randomised, wrapped
from safetensors.torch import load_file
from tiny import expected, prompt, reference, saved, tiny_config

from flexgen import LLM, SamplingParams
from flexgen.runtime.loading.lora import AdapterError
from flexgen.runtime.loading.merging import Merger
from flexgen.runtime.loading.model import Model
from flexgen.runtime.loading.sharing import share
from flexgen.verify.harness import Harness

FAMILIES = ("llama", "qwen3_moe", "gpt_oss", "gemma4_moe", "gemma4_e", "qwen3_5", "qwen3_5_moe")
TOLERANCE = {"qwen3_5": 1e-4, "qwen3_5_moe": 1e-4}
"""Of the largest logit. The delta rule: transformers' chunked form and a recurrence differ by more than fp32 rounds."""
TOKENS = prompt(24)


def logits(model):
    return Harness(model, page_size=16).feed({0: TOKENS})[0]


def assert_equal(model, peft, spec):
    wanted = expected(peft, TOKENS)
    difference = (logits(model) - wanted).abs().max() / wanted.abs().max()
    assert difference < TOLERANCE.get(spec, 1e-5)


def storages(model):
    return {(index, weight.role): model.stored(layer, weight) for layer, weight, index in model.storages()}


@pytest.mark.parametrize("spec", FAMILIES)
def test_merged_weights_compute_what_peft_computes_and_leave_no_trace(spec, tmp_path):
    peft = wrapped(spec)
    shared = share(peft)
    model = shared.model
    before = {key: (t.data_ptr(), t.clone()) for key, t in storages(model).items()}
    with peft.disable_adapter():
        plain = expected(peft, TOKENS)
    merger = Merger(model)
    done = merger.load(peft, None, None)
    targets = len([name for name, _ in peft.named_parameters() if "lora_A" in name])
    assert done.counts.total() + done.skipped.total() == targets and done.version == 1
    assert_equal(model, peft, spec)
    assert (logits(model) - plain).abs().max() > 1e-2
    read = [getattr(layer, weight.role).data_ptr() for layer, weight, _ in model.storages()]
    randomised(peft, seed=9)
    merger.refresh(None)
    assert_equal(model, peft, spec)
    assert read == [getattr(layer, weight.role).data_ptr() for layer, weight, _ in model.storages()]
    assert before.keys() == storages(model).keys()
    assert all(t.data_ptr() == before[key][0] and torch.equal(t, before[key][1]) for key, t in storages(model).items())
    shared.check()


@pytest.mark.parametrize("spec", ["llama", "qwen3_moe", "gpt_oss", "gemma4_moe"])
def test_a_directory_and_tensors_are_read_as_the_live_adapter_is(spec, tmp_path):
    peft = wrapped(spec, rank_pattern={"layers.1.self_attn.q_proj": 5}, alpha_pattern={"o_proj": 11}, use_rslora=spec == "llama")
    peft.save_pretrained(tmp_path)
    _, folder = saved(spec)
    for source, config in ((tmp_path, None), (load_file(tmp_path / "adapter_model.safetensors"), peft.peft_config["default"])):
        model = Model.load(folder, dtype="float32", device="cpu")
        Merger(model).load(source, "mine", config)
        assert_equal(model, peft, spec)


@pytest.mark.parametrize("spec", ["llama", "gpt_oss"])
def test_fifty_updates_and_then_none_leave_the_pristine_weights_bit_for_bit(spec):
    peft = wrapped(spec)
    model = share(peft.to(torch.bfloat16)).model
    pristine = {(index, weight.role): getattr(layer, weight.role).clone() for layer, weight, index in model.storages()}
    merger = Merger(model)
    merger.load(peft, None, None)
    for seed in range(50):
        randomised(peft, seed)
        merger.refresh(None)
    read = lambda: ((index, weight.role, getattr(layer, weight.role)) for layer, weight, index in model.storages())
    assert not all(torch.equal(tensor, pristine[index, role]) for index, role, tensor in read())
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    merger.refresh(None)
    assert all(torch.equal(tensor, pristine[index, role]) for index, role, tensor in read())
    randomised(peft, 3)
    merger.refresh(None)
    assert merger.unload(None).counts == {}
    assert all(torch.equal(tensor, pristine[index, role]) for index, role, tensor in read())


@pytest.mark.parametrize("targets", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head", "q_proj"]])
@pytest.mark.parametrize("spec, tied", [("llama", True), ("llama", False), ("gemma4_e", True)])
def test_embeddings_and_heads_untie_where_one_changes(spec, tied, targets, tmp_path):
    trained = reference(tiny_config(spec, tie_word_embeddings=tied))
    peft = wrapped(spec, model=trained, target_modules=targets)
    model = share(peft).model
    merger = Merger(model)
    merger.load(peft, None, None)
    assert_equal(model, peft, spec)
    separate = model.weights.embed_tokens.data_ptr() != model.weights.lm_head.data_ptr()
    assert separate and model.shadow_bytes < sum(t.nbytes for t in storages(model).values())
    peft.save_pretrained(tmp_path)
    merger.refresh(None, tmp_path)
    assert_equal(model, peft, spec)


def test_a_wider_head_is_merged_where_it_is_kept():
    peft = wrapped("llama", model=reference(tiny_config("llama", tie_word_embeddings=True)).bfloat16(), target_modules=["lm_head"])
    model = share(peft, head_dtype=torch.float32).model
    head = model.weights.lm_head.data_ptr()
    Merger(model).load(peft, None, None)
    module = peft.base_model.model.lm_head
    a, b = (part["default"].weight.float() for part in (module.lora_A, module.lora_B))
    assert torch.equal(model.weights.lm_head, module.base_layer.weight.float() + 2.0 * (b @ a))
    assert model.weights.lm_head.data_ptr() == head and model.shadow_bytes == 0


def test_active_adapters_add_up_and_others_do_not_count():
    peft = wrapped("llama", target_modules=["q_proj", "down_proj"])
    peft.add_adapter("second", type(peft.peft_config["default"])(r=2, lora_alpha=3, target_modules=["q_proj", "up_proj"]))
    randomised(peft, 4)
    for active in (["default"], ["default", "second"], ["second"]):
        peft.base_model.set_adapter(active)
        model = share(peft).model
        merger = Merger(model)
        assert set(merger.load(peft, None, None).counts) == {"qkv", *(("mlp_down",) if "default" in active else ()),
                                                            *(("mlp_gate_up",) if "second" in active else ())}  # fmt: skip
        assert_equal(model, peft, "llama")
    peft.base_model.set_adapter(["default", "second"])
    merger.unload("second")
    merger.load(peft, "default", None)
    merger.load(peft, "second", None)
    assert_equal(model, peft, "llama")
    merger.unload("default")
    peft.base_model.set_adapter(["second"])
    assert_equal(model, peft, "llama")


def test_a_module_an_expert_as_older_peft_wrote_it(tmp_path):
    from peft import PeftModel
    from runtime.loading.test_lora import per_expert_adapter

    config = tiny_config("qwen3_moe", num_experts=5, mlp_only_layers=[])
    trained = reference(config)
    model = share(trained).model
    per_expert_adapter(tmp_path, len(model.layers), 5, config["hidden_size"], config["moe_intermediate_size"])
    done = Merger(model).load(tmp_path, None, None)
    assert done.counts == {"moe_gate_up": 10 * len(model.layers), "moe_down": 5 * len(model.layers)}
    peft = PeftModel.from_pretrained(reference(config), tmp_path)
    assert_equal(model, peft, "qwen3_moe")
    live = share(peft).model
    Merger(live).load(peft, None, None)
    assert_equal(live, peft, "qwen3_moe")


def broken(change):
    """The tensors and config of an adapter of llama after `change`, which may return others."""
    peft = wrapped("llama", target_modules=["q_proj", "o_proj"])
    from peft import get_peft_model_state_dict

    tensors = {name: tensor.clone() for name, tensor in get_peft_model_state_dict(peft).items()}
    config = peft.peft_config["default"].to_dict()
    change(tensors, config)
    return tensors, config


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


def poison(tensors, config):
    tensors[FIRST.format("B")][1, 1] = float("nan")


def of_another_base(tensors, config):
    tensors[FIRST.format("B")] = torch.ones(8, 3)


def without_a_module(tensors, config):
    del tensors[FIRST.format("A")], tensors[FIRST.format("B")]


def with_an_unnamed_module(tensors, config):
    config["target_modules"] = ["o_proj"]


def of_nothing(tensors, config):
    tensors.clear()
    config["target_modules"] = ["z_proj"]


def of_a_router(tensors, config):
    for part in "AB":
        tensors[FIRST.replace("self_attn.q_proj", "mlp.gate").format(part)] = tensors.pop(FIRST.format(part))


@pytest.mark.parametrize(
    "change, message",
    [
        (poison, r"adapter mine: layers.0.self_attn.q_proj holds NaN"),
        (lambda t, c: c.update(r=5), r"has rank 3, and its config says 5"),
        (lambda t, c: t.pop(FIRST.format("B")), r"layers.0.self_attn.q_proj has lora_A and lacks the other"),
        (of_another_base, r"the update of .*q_proj is \(8, 64\), and the weight of this model is .* another base"),
        (without_a_module, r"adapter mine lacks layers.0.self_attn.q_proj"),
        (with_an_unnamed_module, r"adapter mine holds, and its config does not name, layers.0"),
        (of_nothing, r"adapter mine changes no module of llama"),
        (of_a_router, r"adapter mine changes .*mlp.gate, which is no module of llama that adapters reach"),
        (lambda t, c: c.update(use_dora=True), r"use_dora=True, which is not served: DoRA"),
        (lambda t, c: c.update(modules_to_save=["lm_head"]), r"modules_to_save=\['lm_head'\], which is not served"),
        (lambda t, c: c.update(trainable_token_indices=[1]), r"trainable_token_indices"),
        (lambda t, c: c.update(lora_bias=True), r"lora_bias"),
        (lambda t, c: c.update(bias="all"), r"bias='all'"),
        (lambda t, c: c.update(fan_in_fan_out=True), r"fan_in_fan_out"),
        (lambda t, c: c.update(init_lora_weights="pissa_niter_4"), r"'pissa_niter_4', which changes the base weights"),
        (lambda t, c: c.update(layer_replication=[[0, 1]]), r"layer_replication=.* not known here"),
        (lambda t, c: c.update(peft_type="IA3"), r"of type IA3"),
        (lambda t, c: t.update({"base_model.model.model.norm.weight": torch.ones(64)}), r"norm.weight, which is no lora_A"),
        (lambda t, c: t.update({FIRST.format("A.x"): torch.ones(3, 64)}), r"those of several adapters"),
    ],
)
def test_what_does_not_fit_is_named_and_changes_nothing(change, message):
    _, folder = saved("llama")
    model = Model.load(folder, dtype="float32", device="cpu")
    merger = Merger(model)
    merger.load(*(lambda pair: (pair[0], "good", pair[1]))(broken(lambda t, c: None)))
    tensors, config = broken(change)
    before = {role: getattr(model.layers[0], role).clone() for role in ("qkv", "o")}
    with pytest.raises(AdapterError, match=message):
        merger.load(tensors, "mine", config)
    assert all(torch.equal(getattr(model.layers[0], role), tensor) for role, tensor in before.items())
    assert list(merger.loaded) == ["good"] and model.weight_version == 1
    with pytest.raises(AdapterError, match=message.replace("mine", "good")):
        merger.refresh("good", tensors, config)
    assert all(torch.equal(getattr(model.layers[0], role), tensor) for role, tensor in before.items())


def test_what_the_trainer_has_merged_or_switched_off_is_refused(tmp_path):
    peft = wrapped("llama")
    merger = Merger(share(peft).model)
    peft.base_model.disable_adapter_layers()
    with pytest.raises(AdapterError, match="adapters are disabled"):
        merger.load(peft, None, None)
    peft.base_model.enable_adapter_layers()
    peft.merge_adapter()
    with pytest.raises(AdapterError, match="is merged in the trainer"):
        merger.load(peft, None, None)
    peft.unmerge_adapter()
    for source, message in ((3, "got int"), ({}, "give its LoraConfig"), (tmp_path, "adapter_config.json cannot be read")):
        with pytest.raises(AdapterError, match=message):
            merger.load(source, None, None)
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors cannot be read"):
        merger.load(tmp_path, None, None)
    with pytest.raises(AdapterError, match="no adapter called 'other' is merged; there are"):
        merger.refresh("other")
    with pytest.raises(AdapterError, match=r"has no adapter 'default2'"):
        merger.reader.read(peft, "default2")


SIZES = {"max_model_len": 64, "num_gpu_blocks_override": 64, "max_num_seqs": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def answer(engine):
    return engine.generate([TOKENS], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_an_engine_samples_the_adapter_and_no_older_prefix():
    peft = wrapped("llama", seed=5)
    randomised(peft, size=0.4)
    engine = LLM.from_model(peft, **SIZES)
    plain = answer(engine)
    done = engine.load_adapter(peft)
    assert done.counts["qkv"] == 3 * len(engine.llm_engine.model.layers)
    merged = answer(engine)
    assert merged != plain and engine.metrics()["prefix_cache_hit_tokens"] == 0
    assert "merged adapters:" in engine.report()
    with pytest.raises(AdapterError, match="called default is merged already"):
        engine.load_adapter(peft)
    before = {name: parameter.clone() for name, parameter in peft.named_parameters()}
    loss = peft(torch.tensor([TOKENS]), labels=torch.tensor([TOKENS])).loss
    loss.backward()
    torch.optim.AdamW([p for p in peft.parameters() if p.requires_grad], lr=0.1).step()
    engine.refresh_adapter()
    assert answer(engine) == answer(LLM.from_model(merged_copy(peft), **SIZES))
    assert all(torch.equal(p, before[name]) for name, p in peft.named_parameters() if "lora_" not in name)
    engine.unload_adapter()
    assert answer(engine) == plain


def merged_copy(peft):
    import copy

    return copy.deepcopy(peft).merge_and_unload()


def test_merged_weights_follow_the_base():
    peft = wrapped("llama")
    engine = LLM.from_model(peft, **SIZES)
    engine.load_adapter(peft)
    with torch.no_grad():
        for parameter in peft.base_model.model.parameters():
            parameter.mul_(0.9)
    engine.weights_changed()
    assert_equal(engine.llm_engine.model, peft, "llama")
    engine.load_weights({"model.layers.0.self_attn.q_proj.weight": torch.zeros(96, 64)})
    assert_equal(engine.llm_engine.model, peft, "llama")
    assert not peft.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight.any()
