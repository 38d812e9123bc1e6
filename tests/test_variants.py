"""Other shapes of the same specs against transformers: what the tiny configs do not show."""

from __future__ import annotations

import pytest
import torch
from tiny import dump, expected, prompt, reference, tiny_config

from flexgen.contract.configs import normalise
from flexgen.errors import ConfigError
from flexgen.runtime.loading.model import Model
from flexgen.runtime.loading.package import choose, find_packages, load_package
from flexgen.verify.harness import Harness

ROPE = {"rope_theta": 10000.0}
SLIDE, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
VARIANTS = {
    "llama-default": ("llama", {"rope_parameters": {"rope_type": "default", **ROPE}, "attention_bias": False, "mlp_bias": False}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, **ROPE}}),
    "llama-yarn": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, **ROPE}},
    ),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-mha": ("llama", {"num_key_value_heads": ..., "head_dim": ..., "num_attention_heads": 8}),
    "qwen3-full": ("qwen3", {"use_sliding_window": False, "sliding_window": None, "layer_types": ..., "tie_word_embeddings": False}),
    "qwen3-window-1": ("qwen3", {"sliding_window": 1}),
    "qwen3-window-page": ("qwen3", {"sliding_window": 16}),
    "qwen3_moe-sparse": ("qwen3_moe", {"mlp_only_layers": []}),
    "qwen3_moe-raw": ("qwen3_moe", {"norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": []}),
    "qwen3_moe-five": ("qwen3_moe", {"num_experts": 5, "num_experts_per_tok": 5}),
    "qwen3_moe-one": ("qwen3_moe", {"num_experts_per_tok": 1}),
    "qwen3_moe-square": ("qwen3_moe", {"moe_intermediate_size": 32}),
    "qwen3_moe-slide": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}),
    "gpt_oss-five": ("gpt_oss", {"num_local_experts": 5, "num_experts_per_tok": 5}),
    "gpt_oss-one": ("gpt_oss", {"num_experts_per_tok": 1}),
    "gpt_oss-wide": ("gpt_oss", {"sliding_window": 64}),
    "gpt_oss-page": ("gpt_oss", {"sliding_window": 16, "num_hidden_layers": 3, "layer_types": [FULL, SLIDE, SLIDE]}),
    "gemma4_dense-5": ("gemma4_dense", {"num_hidden_layers": 5, "layer_types": [SLIDE, FULL, SLIDE, SLIDE, FULL]}),
    "gemma4_dense-kv1": ("gemma4_dense", {"num_key_value_heads": 1, "num_global_key_value_heads": 1}),
    "gemma4_dense-w1": ("gemma4_dense", {"sliding_window": 1, "final_logit_softcapping": None}),
    "gemma4_moe-long": ("gemma4_moe", {"sliding_window": 64}),
    "gemma4_moe-kv1": ("gemma4_moe", {"num_key_value_heads": 1, "num_experts": 5, "top_k_experts": 5}),
    "gemma4_moe-4": ("gemma4_moe", {"num_hidden_layers": 4, "layer_types": [SLIDE, SLIDE, SLIDE, FULL], "sliding_window": 1}),
    "gemma4_moe-one": ("gemma4_moe", {"top_k_experts": 1}),
    "gemma4_e-e4b": ("gemma4_e", {"use_double_wide_mlp": False, "num_key_value_heads": 2}),
    "gemma4_e-7": (
        "gemma4_e",
        {"num_hidden_layers": 7, "layer_types": [SLIDE, FULL, SLIDE, SLIDE, SLIDE, SLIDE, FULL], "num_kv_shared_layers": 2},
    ),
    "gemma4_e-w1": ("gemma4_e", {"sliding_window": 1}),
    "gemma4_e-long": ("gemma4_e", {"sliding_window": 64, "num_key_value_heads": 4}),
    "qwen3_5-6": ("qwen3_5", {"num_hidden_layers": 6, "layer_types": [LINEAR, LINEAR, FULL, LINEAR, LINEAR, FULL]}),
    "qwen3_5-biased": ("qwen3_5", {"attention_bias": True, "linear_num_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3_5_moe-five": ("qwen3_5_moe", {"num_experts": 5, "num_experts_per_tok": 5}),
    "qwen3_5_moe-kernel": ("qwen3_5_moe", {"linear_conv_kernel_dim": 3, "num_experts_per_tok": 1}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(name, tmp_path):
    torch.set_num_threads(1)
    spec, changes = VARIANTS[name]
    oracle = reference(tiny_config(spec, **changes), seed=3)
    oracle.save_pretrained(tmp_path)
    model = Model.load(tmp_path, dtype="float32", device="cpu")
    assert model.package.folder.name == spec
    tokens = prompt(40, seed=5)
    wanted = expected(oracle, tokens)
    harness = Harness(model, page_size=16)
    got = torch.cat([harness.feed({3: tokens[a:b]})[3] for a, b in ((0, 16), (16, 31), (31, 39), (39, 40))])
    assert (got - wanted).abs().max() < (1e-3 if spec.startswith("qwen3_5") else 1e-4)


HUB = {
    "llama": {"rope_parameters": ..., "rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "qwen3": {"rope_parameters": ..., "rope_theta": 10000.0, "rope_scaling": None},
    "qwen3_moe": {"rope_parameters": ..., "rope_theta": 10000.0, "max_window_layers": 4},
    "gpt_oss": {
        "rope_parameters": ...,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 64,
        },
        "initial_context_length": 64,
    },
    "gemma4_dense": {},
    "gemma4_moe": {},
    "gemma4_e": {"num_global_key_value_heads": None},
    "qwen3_5": {"layer_types": ..., "full_attention_interval": 4},
    "qwen3_5_moe": {"layer_types": ..., "full_attention_interval": 4},
}  # fmt: skip


@pytest.mark.parametrize("spec", HUB)
def test_hub_form_and_saved_form_bind_to_equal_dims(spec, tmp_path):
    hub = tiny_config(spec, **HUB[spec])
    reference(hub).config.save_pretrained(tmp_path)
    package = load_package(find_packages()[spec])
    from flexgen.runtime.loading.config import read_config

    bound = [package.walker.Dims.from_config(normalise(raw, package.walker.TEXT_CONFIG)) for raw in (hub, read_config(tmp_path))]
    assert bound[0] == bound[1]


@pytest.mark.parametrize("spec", HUB)
def test_exactly_one_spec_accepts(spec):
    assert choose(tiny_config(spec)).name == spec


@pytest.mark.parametrize("spec", HUB)
def test_multimodal_nesting(spec):
    package = load_package(find_packages()[spec])
    if package.walker.TEXT_CONFIG is None:
        pytest.skip("this family has no multimodal form")
    inner = tiny_config(spec)
    outer = {"model_type": package.walker.MODEL_TYPES[1], "text_config": inner, "vision_config": {"depth": 3}}
    assert choose(outer).name == spec
    assert package.walker.Dims.from_config(normalise(outer, "text_config")) == package.walker.Dims.from_config(
        normalise(inner, "text_config")
    )


def test_refusals_name_the_field(tmp_path):
    cases = [
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"strange_field": 1}, "strange_field"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, **ROPE}}, "dynamic"),
        ("llama", {"hidden_size": "64"}, "hidden_size"),
        ("qwen3", {"sliding_window": None}, "window"),
        ("gemma4_moe", {"hidden_size_per_layer_input": 12}, "hidden_size_per_layer_input"),
    ]
    for spec, changes, word in cases:
        folder = dump(tiny_config(spec, **changes), tmp_path / word)
        with pytest.raises(ConfigError, match=word):
            Model.load(folder, device="cpu", load_format="dummy")
    folder = dump(tiny_config("llama", strange_field=1), tmp_path / "let")
    assert Model.load(folder, device="cpu", load_format="dummy", ignore_config=["strange_field"]).dims.layers == 3
    for names, message in (
        (["strange_feild"], "names 'strange_feild', .* did you mean 'strange_field'?"),
        (["xyz"], "no such field; leave it out"),
        ("strange_field", r"a list of names: \['strange_field'\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            Model.load(folder, device="cpu", load_format="dummy", ignore_config=names)
    folder = dump(tiny_config("llama", odd={"left": 1, "right": 2}), tmp_path / "nested")
    assert Model.load(folder, device="cpu", load_format="dummy", ignore_config=["odd"]).dims.layers == 3
