"""Prompts of hybrids in Triton, and recorded experts, on a CUDA device: right, and never waiting for it."""

import numpy as np
import pytest
import torch

from flexgen.contract.abi import PAD_SLOT
from flexgen.runtime.llm import LLM
from flexgen.runtime.loading.model import Model
from flexgen.runtime.ops import recurrent
from flexgen.runtime.ops.kernels.delta_rule import delta_prefill
from flexgen.runtime.requests.params import SamplingParams
from tests.test_routes import routers_choose
from tests.tiny import prompt, saved

KEY_HEADS, VALUE_HEADS, KEY, VALUE = 2, 4, 128, 128
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 5e-3}


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("pads", [[], [2, 1, 0, 65]])
@pytest.mark.parametrize(
    "counts", [[1], [64, 65], [1, 130, 3], [700], [1] * 40 + [300], [12] * 9, [128] * 80, [5] * 300]
)
def test_prompts_are_the_chunked_rule_in_float64(counts, pads, dtype):
    torch.manual_seed(0)
    live, rows, tokens = sum(counts), len(counts), sum(counts + pads)
    q, k = torch.randn(2, tokens, KEY_HEADS, KEY, device="cuda").to(dtype)
    v = torch.randn(tokens, VALUE_HEADS, VALUE, device="cuda").to(dtype)
    g, beta = -torch.rand(tokens, VALUE_HEADS, device="cuda"), torch.rand(tokens, VALUE_HEADS, device="cuda").to(dtype)
    state = torch.randn(len(counts) + 2, VALUE_HEADS, KEY, VALUE, device="cuda")
    state[[0, -1]] = float("nan")
    starts = torch.tensor([0, *counts, *pads], device="cuda").cumsum(0).int()
    slots = torch.tensor([*range(rows, 0, -1), *[PAD_SLOT] * len(pads)], device="cuda")
    units = [x.double() / (x.double().pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k)]
    unit_q, unit_k = (x.repeat_interleave(VALUE_HEADS // KEY_HEADS, 1) for x in units)
    exact = state.double()
    inputs = (unit_q * KEY**-0.5, unit_k, v.double(), g.double(), beta.double())
    expected = recurrent.chunked_rule(*(x[:live] for x in inputs), exact, starts[: rows + 1], slots[:rows])
    delta_prefill(q, k, v, g, beta, state.clone(), starts, slots)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = delta_prefill(q, k, v, g, beta, state, starts, slots)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for got, wanted in ((result[:live], expected), (state[1:-1], exact[1:-1])):
        assert (got.double() - wanted).norm() < LIMITS[dtype] * wanted.norm()
    assert state[[0, -1]].isnan().all() and not result[live:].any()


@pytest.mark.parametrize("spec", ("qwen3_moe", "gpt_oss", "gemma4_moe", "qwen3_5_moe"))
def test_captured_steps_record_the_experts_of_transformers(spec):
    reference, folder = saved(spec)
    model = Model.load(folder, dtype="float32", device="cuda")
    llm = LLM(
        model, skip_tokenizer_init=True, max_model_len=128, max_num_seqs=4, block_size=16, num_gpu_blocks_override=40,
        max_num_batched_tokens=48, enable_return_routed_experts=True,
    )  # fmt: skip
    prompts = [prompt(length, seed=length) for length in (30, 17, 1, 64, 9)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), use_tqdm=False)
    for output in outputs:
        answer = output.outputs[0]
        expected = routers_choose(reference, output.prompt_token_ids + answer.token_ids[:-1])
        assert np.array_equal(answer.routed_experts, expected)
