"""The experts that a request returns are those that transformers' routers choose, however the engine came by them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import prompt, saved

from flexgen import LLM, SamplingParams
from flexgen.runtime.execution.regional import compile_layers, mark_sizes
from tests.runtime.execution.test_graphs import host_graphs

SPECS = ("qwen3_moe", "gpt_oss", "gemma4_moe", "qwen3_5_moe", "mixtral")
LENGTHS = (30, 17, 25, 1)
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def routers_choose(reference, tokens):
    """(tokens, routers, K) of transformers."""
    chosen, routers = [], [module for module in reference.modules() if type(module).__name__.endswith("Router")]
    handles = [router.register_forward_hook(lambda *call: chosen.append(call[-1][-1])) for router in routers]
    with torch.no_grad():
        reference(torch.tensor([tokens]))
    for handle in handles:
        handle.remove()
    return torch.stack([choice.view(len(tokens), -1) for choice in chosen], dim=1).numpy()


def engine(spec, **options):
    defaults = {"max_model_len": 64, "max_num_seqs": 3, "block_size": 8, "enable_return_routed_experts": True}
    folder = str(saved(spec)[1])
    return LLM(folder, device="cpu", dtype="float32", skip_tokenizer_init=True, **{**defaults, **options})


def answers(llm, prompts, params=GREEDY):
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


def capture(llm, sizes):
    """Decode in graphs, which on a host hold the code itself, over layers compiled as for a device."""
    compile_layers(llm.model, "aot_eager")
    host_graphs(llm.llm_engine, sizes)
    llm.llm_engine.runner.step.mark = mark_sizes


@pytest.mark.parametrize("spec, captured", [*((spec, False) for spec in SPECS), ("gpt_oss", True), ("qwen3_moe", True)])
def test_experts_are_transformers_own_through_chunks_and_preemptions(spec, captured):
    llm = engine(spec, num_gpu_blocks_override=8, max_num_batched_tokens=11)
    if captured:
        capture(llm, [2, 4])
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    for tokens, answer in zip(prompts, answers(llm, prompts)):
        expected = routers_choose(saved(spec)[0], tokens + answer.token_ids[:-1])
        assert answer.routed_experts.dtype == np.int16
        assert np.array_equal(answer.routed_experts, expected)
    assert llm.metrics()["preemptions"] > 0


def test_only_who_asks_gets_them():
    llm, tokens = engine("qwen3_moe"), prompt(30)
    asked, unasked = (SamplingParams(temperature=0, return_routed_experts=on) for on in (None, False))
    (plain,) = llm.generate([tokens], unasked, use_tqdm=False)
    (first,) = llm.generate([tokens], asked, use_tqdm=False)
    assert plain.outputs[0].routed_experts is None and first.num_cached_tokens == 0  # nobody noted the experts
    assert first.outputs[0].routed_experts.shape == (45, 3, 2)
    assert first.outputs[0].token_ids == plain.outputs[0].token_ids
    mixed = llm.generate([tokens, tokens[::-1], tokens], [asked, unasked, asked], use_tqdm=False)
    assert [output.outputs[0].routed_experts is None for output in mixed] == [False, True, False]


@pytest.mark.parametrize("spec", ("qwen3_moe", "gpt_oss"))
@pytest.mark.parametrize("blocks", (12, 64))
def test_cached_prefixes_bring_the_experts_of_their_tokens(spec, blocks):
    llm = engine(spec, num_gpu_blocks_override=blocks, max_num_batched_tokens=13)
    stem, other = prompt(24, seed=1), prompt(18, seed=2)
    prompts = [stem, stem, [*stem, 5, 6, 7], other, stem[:17], stem + other, other]
    for params in (SamplingParams(temperature=0, max_tokens=9, ignore_eos=True), SamplingParams(n=3, seed=4, max_tokens=9)):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert any(output.num_cached_tokens for output in outputs)
        for output in outputs:
            for answer in output.outputs:
                expected = routers_choose(saved(spec)[0], output.prompt_token_ids + answer.token_ids[:-1])
                assert np.array_equal(answer.routed_experts, expected)
    llm.reset_prefix_cache()
    assert not llm.llm_engine.tables.pools[0]._notes
    assert (blocks == 64) or llm.metrics()["preemptions"] > 0


def test_experts_arrive_with_the_end_of_a_stream_and_stop_with_the_answer():
    llm, tokens = engine("qwen3_moe"), prompt(12)
    (whole,) = answers(llm, [tokens])
    stop = next(token for token in whole.token_ids[3:] if token not in whole.token_ids[:3])
    params = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[stop])
    *partial, last = [output.outputs[0] for output in llm.stream([tokens], params)]
    assert all(answer.routed_experts is None for answer in partial)
    assert len(last.routed_experts) == 12 + len(last.token_ids) - 1 < len(whole.routed_experts)
    assert np.array_equal(last.routed_experts, whole.routed_experts[: len(last.routed_experts)])


def test_off_is_free_and_asking_for_what_is_not_there_says_why():
    llm = engine("qwen3_moe", enable_return_routed_experts=False)
    assert llm.llm_engine.cache.recorded is None
    assert answers(llm, [[1, 2]])[0].routed_experts is None
    with pytest.raises(ValueError, match="LLM\\(enable_return_routed_experts=True\\)"):
        answers(llm, [[1, 2]], SamplingParams(return_routed_experts=True))
    with pytest.raises(ValueError, match="this model has no routed experts"):
        engine("llama")
    dense = engine("llama", enable_return_routed_experts=False)
    with pytest.raises(ValueError, match="this model has no routed experts"):
        answers(dense, [[1, 2]], SamplingParams(return_routed_experts=True))
    with pytest.raises(ValueError, match="return_routed_experts"):
        SamplingParams(return_routed_experts="yes")
