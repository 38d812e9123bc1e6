"""Layers compiled once a kind, as on a GPU but for the backend: same tokens, few graphs, and none more later."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tiny import SOME, dump, prompt, saved, tiny_config
from torch._dynamo.utils import counters

from flexgen import LLM, SamplingParams
from flexgen.runtime.execution import regional, start
from flexgen.runtime.execution.regional import compile_layers
from flexgen.runtime.ops import expert_backends as moe
from flexgen.runtime.ops import experts
from flexgen.runtime.options import EngineOptions

LENGTHS = (1, 40, 2, 17, 1, 33)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Nothing compiled, nothing counted, and the compiler's settings put back afterwards."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(start, "compile_layers", partial(compile_layers, backend="eager"))
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False):
        yield
    torch._dynamo.reset()


def engine(folder, **options):
    sizes = {"max_model_len": 64, "max_num_seqs": 4, "block_size": 8, "num_gpu_blocks_override": 40}
    return LLM(str(folder), device="cpu", dtype="float32", skip_tokenizer_init=True, **sizes | options)


def compiled(folder, **options):
    """An engine that starts as on a GPU, and how many graphs that took."""
    before = graphs()
    llm = engine(folder, **options)
    core = llm.llm_engine
    start.compile_step(core.runner.step, core.options, [1, 2, 4])
    return llm, graphs() - before


def graphs():
    return counters["stats"]["unique_graphs"]


def answers(llm, prompts):
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


def deeper(config):
    """With twice the layers."""
    return config | {field: 2 * config[field] for field in ("num_hidden_layers", "layer_types") if field in config}


@pytest.mark.parametrize("spec", SOME)
def test_compiled_layers_are_few_and_give_the_same_tokens_for_steps_of_every_size(spec):
    """Prompts of one token and of many, together and alone, whole and in chunks that decode steps share."""
    folder, prompts = saved(spec)[1], [prompt(length, seed=length) for length in LENGTHS]
    expected = answers(engine(folder), prompts)
    llm, taken = compiled(folder)
    kinds = len(set(llm.model.dims.kinds))
    assert kinds <= taken <= 2 * kinds
    assert answers(llm, prompts) == expected
    assert [answers(llm, [ids])[0] for ids in prompts] == expected
    llm.llm_engine.scheduler.max_num_batched_tokens = 7
    assert answers(llm, prompts) == expected
    assert graphs() == taken


@pytest.mark.parametrize("spec", ("gpt_oss", "qwen3_moe"))
def test_experts_that_change_with_the_number_of_tokens_take_no_more_variants(spec, monkeypatch):
    """As on a GPU: the kernels of few tokens and of many are chosen inside an operator."""
    used = set()
    noted = lambda name: lambda *call: used.add(name) or moe.each(*call)
    few = lambda x_TD, weights, gate: x_TD.shape[0] <= moe.ROUTED_TOKENS
    monkeypatch.setattr(experts, "_takes_reference", lambda x_TD: False)
    monkeypatch.setattr(moe, "BACKENDS", ((few, noted("few")), (lambda x_TD, weights, gate: True, noted("many"))))
    folder, prompts = saved(spec)[1], [prompt(length, seed=length) for length in (60, 1, 61, 59, 50, 58, 3)]
    sizes = {"max_num_seqs": 7, "num_gpu_blocks_override": 70, "max_model_len": 70}
    expected = answers(engine(folder, **sizes), prompts)
    assert used == {"few", "many"}
    llm, taken = compiled(folder, **sizes)
    used.clear()
    assert taken <= 2 * len(set(llm.model.dims.kinds))
    assert sum(map(len, prompts)) > moe.ROUTED_TOKENS and answers(llm, prompts) == expected
    assert used == {"few", "many"}
    assert answers(llm, prompts[:3]) == expected[:3] and answers(llm, prompts[1:2]) == expected[1:2]
    assert graphs() == taken


@pytest.mark.parametrize("spec", ("gemma4_e", "gpt_oss", "qwen3_5", "qwen3_moe"))
def test_twice_the_layers_take_no_more_compilations(spec, tmp_path):
    config = tiny_config(spec)
    short, taken = compiled(dump(config, tmp_path / "short"), load_format="dummy")
    long, taken_by_long = compiled(dump(deeper(config), tmp_path / "long"), load_format="dummy")
    assert len(long.model.layers) == 2 * len(short.model.layers)
    assert set(long.model.dims.kinds) == set(short.model.dims.kinds)
    assert taken_by_long == taken


@pytest.mark.parametrize("most_tokens", [1, 2, 7, 200, 256, 257, 258, 300, 8192])
@pytest.mark.parametrize("max_model_len", [2, 48, 4096])
def test_prompts_that_are_rehearsed_fit_and_reach_both_kinds_of_experts(most_tokens, max_model_len):
    step = engine(saved("qwen3_moe")[1]).llm_engine.runner.step
    options = EngineOptions(max_model_len, max_num_seqs=min(4, most_tokens), max_num_batched_tokens=most_tokens)
    prompts = start.rehearsed_prompts(step, options)
    sizes = [rows * tokens + 1 for rows, tokens in prompts]
    assert all(tokens <= max(max_model_len, start._SHORT_PROMPT) for _, tokens in prompts)
    assert max(sizes, default=0) <= most_tokens
    assert max(sizes, default=0) > moe.ROUTED_TOKENS or most_tokens <= moe.ROUTED_TOKENS + start._LONG_PROMPT


def test_a_layer_with_more_variants_than_it_may_have_raises(monkeypatch):
    monkeypatch.setattr(regional, "VARIANTS", 1)
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        compiled(saved("llama")[1])


def test_an_engine_may_be_made_in_inference_mode():
    """Its tables are inference tensors then, which the thread that compiles kernels writes too."""
    folder, prompts = saved("qwen3_5")[1], [prompt(9)]
    with torch.inference_mode():
        llm, _ = compiled(folder)
        assert answers(llm, prompts) == answers(engine(folder), prompts)


def test_what_fails_in_the_thread_that_compiles_kernels_is_raised(monkeypatch):
    def broken(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(start, "rehearse", broken)
    with pytest.raises(RuntimeError, match="no such kernel"):
        compiled(saved("llama")[1])
