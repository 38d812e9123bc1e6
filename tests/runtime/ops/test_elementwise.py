"""Norms, activations and rotary embedding against transformers' own modules, bit for bit."""

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.cohere2.modeling_cohere2 import Cohere2LayerNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5RMSNorm,
    Qwen3_5RMSNormGated,
    apply_rotary_pos_emb,
)

from flexgen.runtime.ops import elementwise as ops

torch.set_num_threads(1)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def filled(module, dtype):
    """A module of theirs in `dtype` with a gain that is nowhere 0 or 1."""
    module = module.to(dtype)
    with torch.no_grad():
        module.weight.copy_(torch.randn(module.weight.shape) * 0.7 + 0.3)
    return module


@DTYPES
@pytest.mark.parametrize(
    "ours, theirs",
    [
        (ops.rms_norm, GptOssRMSNorm),
        (ops.rms_norm, Gemma4RMSNorm),
        (ops.rms_norm_cast_before, LlamaRMSNorm),
        (ops.rms_norm_one_plus, Qwen3_5RMSNorm),
    ],
)
def test_norms_are_bitwise_theirs(dtype, ours, theirs):
    torch.manual_seed(0)
    module = filled(theirs(48, eps=1e-5), dtype)
    x = (torch.randn(7, 3, 48) * 4).to(dtype)
    result = ours(x, module.weight, 1e-5)
    assert result.dtype == dtype
    assert torch.equal(result, module(x))


def test_the_flavours_differ_where_it_matters():
    torch.manual_seed(0)
    x, gain = torch.randn(64, 48).bfloat16(), torch.randn(48).bfloat16()
    assert not torch.equal(ops.rms_norm(x, gain, 1e-6), ops.rms_norm_cast_before(x, gain, 1e-6))


@DTYPES
def test_norm_without_gain_is_bitwise_theirs(dtype):
    torch.manual_seed(1)
    x = torch.randn(9, 32).to(dtype)
    assert torch.equal(ops.rms_norm(x, None, 1e-6), Gemma4RMSNorm(32, eps=1e-6, with_scale=False)(x))


@DTYPES
def test_gated_norm_is_bitwise_theirs(dtype):
    torch.manual_seed(2)
    module = filled(Qwen3_5RMSNormGated(32, eps=1e-6), dtype)
    x, z = torch.randn(5, 4, 32).to(dtype), torch.randn(5, 4, 32).to(dtype)
    assert torch.equal(ops.gated_rms_norm(x, z, module.weight, 1e-6), module(x, z))


@DTYPES
@pytest.mark.parametrize("rotary", [16, 8, 2])
def test_rotate_is_bitwise_theirs(dtype, rotary):
    torch.manual_seed(3)
    x_TNH = torch.randn(6, 3, 16).to(dtype)
    positions = torch.tensor([5, 0, 9, 9, 2, 1])
    angles = torch.randn(10, rotary // 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    wide = [torch.cat((table[positions],) * 2, dim=-1)[None] for table in (cos, sin)]
    theirs, _ = apply_rotary_pos_emb(x_TNH.transpose(0, 1)[None], x_TNH.transpose(0, 1)[None], *wide)
    assert torch.equal(ops.rotate(x_TNH, cos, sin, positions), theirs[0].transpose(0, 1))


@DTYPES
@pytest.mark.parametrize(
    "ours, theirs", [("silu", "silu"), ("gelu", "gelu"), ("gelu_tanh", "gelu_pytorch_tanh"), ("relu", "relu")]
)
def test_activations_are_bitwise_theirs(dtype, ours, theirs):
    torch.manual_seed(4)
    x = torch.randn(5, 24).to(dtype)
    assert torch.equal(ops.ACTIVATIONS[ours](x), ACT2FN[theirs](x))


def test_softcap_bounds_and_none_is_the_identity():
    x = torch.linspace(-1000, 1000, 101)
    assert ops.softcap(x, None) is x
    assert ops.softcap(x, 30.0).abs().max() <= 30
    small = torch.linspace(-0.1, 0.1, 11)
    torch.testing.assert_close(ops.softcap(small, 30.0), small, atol=1e-6, rtol=1e-5)


def test_traces_as_one_graph_with_dynamic_lengths():
    cos = torch.randn(32, 4)
    gain = torch.randn(16)

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def layer(x, positions):
        h = ops.rms_norm_one_plus(ops.rms_norm_cast_before(ops.rms_norm(x, gain, 1e-6), gain, 1e-6), gain, 1e-6)
        h = ops.rotate(ops.gated_rms_norm(h, x, gain, 1e-6), cos, cos, positions)
        return ops.ACTIVATIONS["gelu_tanh"](ops.softcap(h, 5.0))

    for tokens in (3, 8):
        x, positions = torch.randn(tokens, 2, 16), torch.arange(tokens)
        torch.testing.assert_close(layer(x, positions), layer._torchdynamo_orig_callable(x, positions))


def test_rounded_is_the_number_that_the_dtype_holds():
    assert ops.rounded(53.0659966, torch.bfloat16) == torch.tensor(53.0659966).bfloat16().item() == 53.0
    assert ops.rounded(53.0, torch.float32) == 53.0


def test_gelu_new_rounds_as_transformers_does():
    x = torch.randn(500, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(ops.gelu_new(x), ACT2FN["gelu_new"](x))
    assert not torch.equal(ops.gelu_new(x), torch.nn.functional.gelu(x, approximate="tanh"))


def test_queries_are_scaled_in_fp32_or_by_a_rounded_factor():
    q_TNH = torch.randn(40, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    positions_T = torch.arange(40)
    factor_T11 = (torch.log1p(torch.floor((positions_T.float() + 1.0) / 4)) * 0.1 + 1.0)[:, None, None]
    wide = ops.scale_queries(q_TNH, positions_T, 0.1, 4, 1, fp32=True)
    assert torch.equal(wide, (q_TNH * factor_T11).bfloat16())
    narrow = ops.scale_queries(q_TNH, positions_T, 0.1, 4, 1)
    assert torch.equal(narrow, q_TNH * factor_T11.bfloat16()) and not torch.equal(narrow, wide)


def test_layer_norm_rounds_as_each_kind_of_module_does():
    """Two orders of the same fp32 sums differ in one element of thirty thousand."""
    x_TD = torch.randn(20000, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    gain, bias = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    biased, plain = torch.nn.LayerNorm(64).bfloat16(), Cohere2LayerNorm(64, eps=1e-5).bfloat16()
    with torch.no_grad():
        biased.weight.copy_(gain)
        biased.bias.copy_(bias)
        plain.weight.copy_(gain)
        assert torch.equal(ops.layer_norm(x_TD, gain, bias, 1e-5), biased(x_TD))
        assert torch.equal(ops.layer_norm(x_TD, gain, None, 1e-5), plain(x_TD))
