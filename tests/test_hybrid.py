"""Hybrids with recurrent state through the engine: no batch, chunk, slot or poisoned neighbour changes a token."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from tiny import prompt, saved
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

from flexgen import LLM, SamplingParams
from flexgen.runtime.loading.model import Model
from flexgen.verify.harness import Harness
from flexgen.verify.reference import recorded
from tests.runtime.execution.test_graphs import host_graphs

SPECS = pytest.mark.parametrize("spec", ("qwen3_5", "qwen3_5_moe"))
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = [prompt(length, seed=length) for length in (70, 1, 17, 64, 33, 5, 65, 16)]


def engine(spec, **options):
    defaults = {"max_model_len": 96, "max_num_seqs": 8, "block_size": 8, "num_gpu_blocks_override": 96}
    folder = str(saved(spec)[1])
    return LLM(folder, device="cpu", dtype="float32", skip_tokenizer_init=True, **{**defaults, **options})


def answers(llm, prompts, params=GREEDY):
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def expected(spec, prompts=PROMPTS):
    """The tokens of each prompt alone, which are transformers' own."""
    llm = engine(spec, max_num_seqs=1)
    found = [answers(llm, [tokens])[0] for tokens in prompts]
    for tokens, got in zip(prompts, found):
        with torch.no_grad():
            logits = saved(spec)[0](torch.tensor([tokens + got])).logits[0, len(tokens) - 1 : -1]
        assert logits.argmax(-1).tolist() == got
    return found


def state_tensors(llm):
    return [state for layers in llm.llm_engine.cache.states.values() for layer in layers for state in layer]


@SPECS
def test_every_batch_size_gives_the_same_tokens(spec):
    alone = expected(spec)
    for size in (2, 4, 8):
        llm = engine(spec)
        batches = [PROMPTS[start : start + size] for start in range(0, 8, size)]
        assert [tokens for batch in batches for tokens in answers(llm, batch)] == alone


@SPECS
@pytest.mark.parametrize("chunk", [1, 3, 16, 64])
def test_chunks_and_reused_slots_give_the_same_tokens(spec, chunk):
    llm = engine(spec, max_num_seqs=min(2, chunk), max_num_batched_tokens=chunk)
    assert answers(llm, PROMPTS[:5]) == expected(spec, PROMPTS[:5])
    assert llm.metrics()["prefill_steps"] >= sum(map(len, PROMPTS[:5])) / chunk


@SPECS
def test_free_slots_between_running_ones_change_nothing(spec):
    alone, llm = expected(spec), engine(spec, max_num_seqs=4)
    first = [llm.llm_engine.add(str(i), PROMPTS[i], GREEDY) for i in range(4)]
    for _ in range(3):
        llm.llm_engine.step()
    llm.llm_engine.abort(first[0])
    llm.llm_engine.abort(first[2])
    for _ in range(2):
        llm.llm_engine.step()
    later = llm.llm_engine.add("later", PROMPTS[4], GREEDY)
    while llm.llm_engine.unfinished:
        llm.llm_engine.step()
    assert [group.output().outputs[0].token_ids for group in (first[1], first[3], later)] == [alone[i] for i in (1, 3, 4)]


@SPECS
def test_state_in_16_bits_takes_half_the_memory_and_changes_logprobs_a_little(spec):
    params, found = SamplingParams(prompt_logprobs=0, max_tokens=1), []
    wide, narrow = engine(spec, max_num_batched_tokens=8), engine(spec, max_num_batched_tokens=8, mamba_ssm_cache_dtype="bfloat16")
    for llm in (wide, narrow):
        (output,) = llm.generate([PROMPTS[0]], params, use_tqdm=False)
        found.append(torch.tensor([next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]]))
    assert 0 < (found[0] - found[1]).abs().median() < 2e-2  # a route that changes may change one token's more
    saved_bytes = wide.llm_engine.cache.total_bytes - narrow.llm_engine.cache.total_bytes
    own = [state for state in state_tensors(narrow) if state.dtype == torch.bfloat16]
    assert own and saved_bytes == sum(state.nbytes for state in own)


def test_a_dtype_of_state_is_refused_where_it_is_none_and_where_there_is_no_state():
    with pytest.raises(ValueError, match="mamba_ssm_cache_dtype is 'fp8', and must be auto or one of float32, bfloat16"):
        engine("qwen3_5", mamba_ssm_cache_dtype="fp8")
    with pytest.raises(ValueError, match="mamba_ssm_cache_dtype=bfloat16: this model keeps no such state"):
        engine("llama", mamba_ssm_cache_dtype="bfloat16")


@SPECS
def test_n_slots_decode_n_requests_in_one_step(spec):
    llm = engine(spec)
    answers(llm, [[token] for token in range(8)])
    assert llm.metrics()["prefill_steps"] == 1 and llm.metrics()["decode_steps"] == 9


@pytest.mark.parametrize("captured", [False, True])
@SPECS
def test_nan_in_pad_and_free_slots_and_pages_changes_nothing(spec, captured):
    """Before each step, whatever no running request owns is NaN; captured steps have five padding rows or more."""
    alone, llm = expected(spec), engine(spec, max_num_seqs=3, max_num_batched_tokens=24)
    engine_, (pool,) = llm.llm_engine, llm.llm_engine.tables.pools
    if captured:
        host_graphs(engine_, [8])
    groups = [engine_.add(str(i), tokens, GREEDY) for i, tokens in enumerate(PROMPTS)]
    paged = [pages for layer in llm.model.layers for pages in (getattr(layer, "k_pages", None), getattr(layer, "v_pages", None))]
    while engine_.unfinished:
        for state in state_tensors(llm):
            state[[0, *engine_.scheduler.free_slots]] = math.nan
        for pages in (pages for pages in paged if pages is not None):
            pages[[0, *pool._free]] = math.nan
        engine_.step()
    assert [group.output().outputs[0].token_ids for group in groups] == alone


def sequential(query, key, value, g, beta, initial_state, output_final_state, **_):
    """The gated delta rule as published, a token at a time, in float64; the arguments of transformers' function."""
    assert initial_state is None and not output_final_state
    group = value.shape[2] // key.shape[2]
    q, k, v, g, beta = (x.double() for x in (query, key, value, g, beta))
    q, k = (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(group, dim=2) for x in (q * q.shape[-1] ** -0.5, k))
    state, outputs = q.new_zeros(*v.shape[:1], v.shape[2], k.shape[-1], v.shape[-1]), []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        change = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + k[:, t, :, :, None] * change[:, :, None]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, dim=1).to(value.dtype), None


@SPECS
def test_mixers_are_a_sequential_rule_in_float64(spec, monkeypatch):
    """Each layer on transformers' own input of it, since rounding grows from layer to layer."""
    oracle, folder = saved(spec)
    for module in (modeling_qwen3_5, modeling_qwen3_5_moe):
        monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", sequential)
    tokens = prompt(100)
    mixers = {name: module for name, module in oracle.named_modules() if name.endswith("linear_attn")}
    with torch.no_grad(), recorded(mixers) as calls:
        oracle(torch.tensor([tokens]), use_cache=False)
    model = Model.load(folder, dtype="float32", device="cpu")
    layers = [layer for layer, kind in zip(model.layers, model.dims.kinds) if kind == "linear"]
    assert len(layers) == len(calls) > 0
    for chunks in ([100], [70, 1, 1, 28], [3] * 33 + [1]):
        harness = Harness(model, 1, 100)
        starts = [0, *torch.tensor(chunks).cumsum(0).tolist()]
        steps = [harness.step({0: tokens[a:b]})[1] for a, b in pairwise(starts)]
        for layer, call in zip(layers, calls.values()):
            parts = [
                model.package.attention.gdn_mixer(layer, x_TD, model.dims, step)
                for x_TD, step in zip(call.input[0].split(chunks), steps)
            ]
            assert (torch.cat(parts) - call.output[0]).abs().max() < 1e-4


def test_the_report_gives_state_a_slot_and_pages_a_token():
    llm = engine("qwen3_5", max_num_seqs=3)
    dims, report = llm.model.dims, llm.report()
    kinds = dims.kinds
    conv = (2 * dims.key_heads * dims.key_dim + dims.value_heads * dims.value_dim) * dims.kernel * 4
    rule = dims.value_heads * dims.key_dim * dims.value_dim * 4
    a_slot = kinds.count("linear") * (conv + rule)
    a_token = kinds.count("full") * 2 * dims.kv_heads * dims.head_dim * 4
    assert f"recurrent state, gdn: {kinds.count('linear')} layers, 3 slots, {a_slot / 1024:.2f} KiB a slot" in report
    assert f"pages, all tokens, full: {kinds.count('full')} layers" in report and f", {a_token} B a token" in report
