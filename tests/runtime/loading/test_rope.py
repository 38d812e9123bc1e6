"""Rope tables against transformers' rotary embedding modules, exactly; and what `bind` refuses."""

import dataclasses

import pytest
import torch
from transformers import Gemma4TextConfig, LlamaConfig, Qwen3_5TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from flexgen.errors import ConfigError
from flexgen.runtime.loading.rope import Rope

torch.set_num_threads(1)
ALL = ("default", "linear", "llama3", "yarn", "proportional")
LENGTH = 700

LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0}
PARAMETERS = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    {"rope_type": "linear", "rope_theta": 10000, "factor": 4, "partial_rotary_factor": 0.5},
    {**LLAMA3, "original_max_position_embeddings": 128},
    LLAMA3,
    {**LLAMA3, "original_max_position_embeddings": 8192, "partial_rotary_factor": 0.25},
    {**YARN, "original_max_position_embeddings": 4096},
    {**YARN, "original_max_position_embeddings": 4096, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
    {**YARN, "original_max_position_embeddings": 64, "beta_fast": 16, "beta_slow": 2},
    {**YARN, "original_max_position_embeddings": 64, "mscale": 0.707, "mscale_all_dim": 1.0},
    {**YARN, "original_max_position_embeddings": 64, "mscale": 0.707},
    {**YARN, "original_max_position_embeddings": 64, "attention_factor": 1.25},
    {**YARN, "original_max_position_embeddings": 64, "factor": None},
    {**YARN, "factor": 1.0},
    {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.3, "factor": 2.0},
    {"rope_type": "proportional", "rope_theta": 1e6},
]


def bind(parameters, head_dim=64, max_position=512, types=ALL):
    return Rope.bind(parameters, types=types, head_dim=head_dim, max_position=max_position)


def assert_equal_tables(rope, module, dtype, **kwargs):
    cos, sin = rope.tables(LENGTH, dtype, "cpu")
    theirs = module(torch.empty(1, dtype=dtype), torch.arange(LENGTH)[None], **kwargs)
    for ours, other in zip((cos, sin), theirs, strict=True):
        half = other.shape[-1] // 2
        assert ours.shape == (LENGTH, half) and ours.dtype == dtype
        assert torch.equal(ours, other[0, :, :half])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parameters", PARAMETERS, ids=lambda p: "-".join(str(v) for v in p.values()))
def test_tables_equal_theirs(parameters, dtype):
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        max_position_embeddings=512,
        rope_parameters=dict(parameters),
    )
    assert_equal_tables(bind(parameters), LlamaRotaryEmbedding(config), dtype)


def test_partial_default_equals_qwen3_5():
    multimodal = {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    parameters = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, **multimodal}
    config = Qwen3_5TextConfig(head_dim=256, num_hidden_layers=4, rope_parameters=parameters)
    rope = bind(config.rope_parameters, head_dim=256)
    assert rope.rotary_dim == 64
    cos, _ = rope.tables(LENGTH, torch.float32, "cpu")
    module = Qwen3_5TextRotaryEmbedding(config)
    theirs, _ = module(torch.empty(1), torch.arange(LENGTH)[None])
    assert torch.equal(cos, theirs.reshape(LENGTH, -1)[:, :32])


@pytest.mark.parametrize("layer_type, head_dim", [("sliding_attention", 256), ("full_attention", 512)])
def test_both_ropes_of_gemma4(layer_type, head_dim):
    config = Gemma4TextConfig(num_hidden_layers=6)
    rope = bind(config.rope_parameters[layer_type], head_dim=head_dim)
    assert rope.rotary_dim == head_dim
    assert_equal_tables(rope, Gemma4TextRotaryEmbedding(config), torch.float32, layer_type=layer_type)


def test_ropes_compare_and_hash_by_their_numbers():
    one, same, other = bind(YARN), bind(dict(YARN)), bind({**YARN, "factor": 16.0})
    assert one == same and hash(one) == hash(same) and one != other
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.theta = 1.0


@pytest.mark.parametrize(
    "parameters, message",
    [
        ({"rope_type": "longrope", "rope_theta": 1e4}, "longrope.*default, linear"),
        ({"rope_type": "default"}, "rope_theta"),
        ({"rope_type": "linear", "rope_theta": 1e4}, "lacks factor"),
        ({"rope_type": "llama3", "rope_theta": 1e4, "factor": 2}, "high_freq_factor, low_freq_factor"),
        ({"rope_type": "default", "rope_theta": 1e4, "factor": 2}, "factor, which nothing reads"),
        ({"rope_type": "default", "rope_theta": 1e4, "thetta": 2}, "thetta"),
        ({"rope_type": "default", "rope_theta": "1e4"}, "'1e4'"),
        ({"rope_type": "default", "rope_theta": True}, "True"),
        ({"rope_type": "default", "rope_theta": 0}, "above 0"),
        ({"rope_type": "default", "rope_theta": float("inf")}, "inf"),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": None}, "None"),
        ({"rope_type": "default", "type": "linear", "rope_theta": 1e4}, "both"),
        ({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.5}, "1.5"),
        ({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.05}, "even"),
        ({**YARN, "truncate": 0}, "true or false"),
        ({**LLAMA3, "low_freq_factor": 4.0}, "both `4.0`"),
    ],
)
def test_bind_refuses(parameters, message):
    with pytest.raises(ConfigError, match=message):
        bind(parameters)


def test_bind_refuses_a_type_that_the_spec_does_not_allow():
    with pytest.raises(ConfigError, match=r"linear.*this spec allows default, yarn"):
        bind({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, types=("default", "yarn"))
