"""Routing and experts against transformers' own eager modules."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

from flexgen.runtime.ops import expert_backends as moe
from flexgen.runtime.ops import experts as ops
from flexgen.runtime.ops.experts import experts, renormalise, top_k

torch.set_num_threads(1)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def routes(tokens, count, k, dtype=torch.float32):
    weights, chosen = top_k(torch.rand(tokens, count).softmax(-1), k)
    return weights.to(dtype), chosen


def standard(count, width, inner, dtype, act="silu", cls=Qwen3MoeExperts):
    config = SimpleNamespace(
        num_experts=count, hidden_size=width, moe_intermediate_size=inner, hidden_act=act, hidden_activation=act
    )
    config._experts_implementation = "eager"
    module = cls(config)
    return randomised(module, dtype)


def gpt_oss(count, width, inner, dtype):
    config = SimpleNamespace(
        num_local_experts=count, hidden_size=width, intermediate_size=inner, swiglu_alpha=1.702, swiglu_limit=0.7
    )
    config._experts_implementation = "eager"
    return randomised(GptOssExperts(config), dtype)


def randomised(module, dtype):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return module.to(dtype).requires_grad_(False)


GPT_OSS = {"layout": "in_out", "interleaved": True, "alpha": 1.702, "limit": 0.7, "up_offset": 1.0}


def run_gpt_oss(module, x, weights, chosen):
    biases = {"gate_up_bias": module.gate_up_proj_bias, "down_bias": module.down_proj_bias}
    return experts(x, weights, chosen, module.gate_up_proj, module.down_proj, **GPT_OSS, **biases)


@DTYPES
@pytest.mark.parametrize("tokens, count, k", [(1, 4, 2), (9, 5, 1), (9, 5, 5), (33, 8, 3)])
def test_standard_layout_is_bitwise_theirs(dtype, tokens, count, k):
    torch.manual_seed(0)
    module = standard(count, 24, 16, dtype)
    x = torch.randn(tokens, 24).to(dtype)
    weights, chosen = routes(tokens, count, k, dtype)
    result = experts(x, weights, chosen, module.gate_up_proj, module.down_proj, layout="out_in")
    assert torch.equal(result, module(x, chosen, weights))


@DTYPES
@pytest.mark.parametrize("tokens", [1, 17])
def test_gpt_oss_layout_is_bitwise_theirs(dtype, tokens):
    torch.manual_seed(1)
    module = gpt_oss(5, 24, 24, dtype)
    x = (torch.randn(tokens, 24) * 2).to(dtype)
    weights, chosen = routes(tokens, 5, 2, dtype)
    assert torch.equal(
        run_gpt_oss(module, x, weights, chosen), module(x, router_indices=chosen, routing_weights=weights)
    )


def test_fp32_weights_in_a_16_bit_model_are_bitwise_theirs():
    torch.manual_seed(2)
    module = standard(6, 24, 16, torch.bfloat16, act="gelu_pytorch_tanh", cls=Gemma4TextExperts)
    x = torch.randn(11, 24).bfloat16()
    weights, chosen = routes(11, 6, 3)
    result = experts(x, weights, chosen, module.gate_up_proj, module.down_proj, act="gelu_tanh", layout="out_in")
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, module(x, chosen, weights))


@settings(deadline=None, max_examples=25)
@given(tokens=st.integers(1, 12), count=st.integers(1, 7), data=st.data())
def test_equals_the_textbook_sum(tokens, count, data):
    k = data.draw(st.integers(1, count))
    torch.manual_seed(tokens * count)
    module = standard(count, 12, 8, torch.float64)
    x = torch.randn(tokens, 12, dtype=torch.float64)
    weights, chosen = routes(tokens, count, k, torch.float64)
    result = experts(x, weights, chosen, module.gate_up_proj, module.down_proj, layout="out_in")
    for t in range(tokens):
        expected = torch.zeros(12, dtype=torch.float64)
        for weight, e in zip(weights[t], chosen[t]):
            gate, up = (module.gate_up_proj[e] @ x[t]).chunk(2)
            expected += weight * (module.down_proj[e] @ (torch.nn.functional.silu(gate) * up))
        torch.testing.assert_close(result[t], expected)


def test_all_tokens_to_one_expert_and_experts_of_nan_that_nobody_chose():
    torch.manual_seed(3)
    module = standard(4, 12, 8, torch.float32)
    module.gate_up_proj[0] = module.down_proj[3] = float("nan")
    chosen = torch.full((6, 1), 2)
    x, weights = torch.randn(6, 12), torch.rand(6, 1)
    result = experts(x, weights, chosen, module.gate_up_proj, module.down_proj, layout="out_in")
    assert torch.isfinite(result).all()
    assert torch.equal(result, module(x, chosen, weights))


@pytest.mark.parametrize("on", [True, False])
def test_router_choices_and_weights_are_theirs_ties_included(on):
    torch.manual_seed(4)
    router = Qwen3MoeTopKRouter(SimpleNamespace(num_experts_per_tok=3, num_experts=8, hidden_size=4, norm_topk_prob=on))
    with torch.no_grad():
        router.weight.copy_(torch.randint(-1, 2, (8, 4)).float())
    x = torch.randint(-1, 2, (40, 4)).float()
    _, weights, chosen = router(x)
    scores = torch.nn.functional.linear(x, router.weight).softmax(-1, dtype=torch.float32)
    assert (scores.sort(-1).values.diff() == 0).any()
    ours, ids = top_k(scores, 3)
    assert torch.equal(ids, chosen) and torch.equal(renormalise(ours, on), weights)


def test_traces_as_one_graph_with_dynamic_lengths():
    torch.manual_seed(5)
    module = standard(5, 12, 8, torch.float32)

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def block(x, scores):
        weights, chosen = top_k(scores, 2)
        return experts(x, renormalise(weights, True), chosen, module.gate_up_proj, module.down_proj, layout="out_in")

    for tokens in (3, 7):
        x, scores = torch.randn(tokens, 12), torch.rand(tokens, 5)
        torch.testing.assert_close(block(x, scores), block._torchdynamo_orig_callable(x, scores))


@pytest.mark.parametrize("oriented", ["out_in", "in_out"])
def test_grouped_products_equal_the_loop(oriented):
    torch.manual_seed(6)
    module = standard(5, 24, 16, torch.float32) if oriented == "out_in" else gpt_oss(5, 24, 16, torch.float32)
    weights = moe.ExpertWeights(module.gate_up_proj, module.down_proj, oriented)
    gate = moe.Gate()
    if oriented == "in_out":
        biases = (module.gate_up_proj_bias, module.down_proj_bias)
        weights = moe.ExpertWeights(module.gate_up_proj, module.down_proj, oriented, True, *biases)
        gate = moe.Gate(alpha=1.702, limit=0.7, up_offset=1.0)
    for tokens, k in ((1, 1), (3, 2), (40, 5)):
        x, (_, chosen) = torch.randn(tokens, 24), routes(tokens, 5, k)
        torch.testing.assert_close(moe.grouped(x, chosen, weights, gate), moe.each(x, chosen, weights, gate))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_of_each_expert_weighted_and_added_are_the_loop(dtype, monkeypatch):
    torch.manual_seed(8)
    module, x, (weights, chosen) = gpt_oss(5, 24, 24, dtype), torch.randn(9, 24).to(dtype), routes(9, 5, 3)
    expected = run_gpt_oss(module, x, weights, chosen)
    monkeypatch.setattr(ops, "_takes_reference", lambda x_TD: False)
    monkeypatch.setattr(moe, "BACKENDS", ((lambda x_TD, weights, gate: True, moe.each),))
    result = run_gpt_oss(module, x, weights, chosen)
    limit = 1e-6 if dtype == torch.float32 else 5e-3
    assert result.dtype == dtype and (result - expected).float().norm() < limit * expected.float().norm()


def test_recording_traces_as_one_graph_and_leaves_other_rows():
    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def choose(scores, record):
        return top_k(scores, 2, record)

    for tokens in (3, 7):
        record = torch.full((8, 2), -1, dtype=torch.int16)
        _, chosen = choose(torch.rand(tokens, 5), record)
        assert torch.equal(record[:tokens].long(), chosen) and (record[tokens:] == -1).all()


def test_shapes_dtypes_and_strides_choose_the_backend():
    module = standard(4, 24, 16, torch.bfloat16)
    weights = moe.ExpertWeights(module.gate_up_proj, module.down_proj, "out_in")
    few, many = (torch.zeros(tokens, 24).bfloat16() for tokens in (moe.ROUTED_TOKENS, moe.ROUTED_TOKENS + 1))
    assert moe.choose(few, weights, moe.Gate()) is moe.routed and moe.choose(many, weights, moe.Gate()) is moe.grouped
    odd = standard(4, 20, 12, torch.bfloat16)
    assert moe.choose(torch.zeros(999, 20).bfloat16(), moe.ExpertWeights(odd.gate_up_proj, odd.down_proj, "out_in"), moe.Gate()) is moe.each
    assert moe.choose(many.float(), weights, moe.Gate()) is moe.each
