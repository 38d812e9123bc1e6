"""Captured decode of every spec on a CUDA device: right, bit for bit its own uncaptured code, and never waiting."""

import gc
from contextlib import contextmanager

import pytest
import torch
from torch._dynamo.utils import counters

from flexgen.runtime.llm import LLM
from flexgen.runtime.loading.model import Model
from flexgen.runtime.loading.rope import checked_length
from flexgen.runtime.requests.params import SamplingParams
from flexgen.runtime.sampling.sampler import Features, finish, finish_on
from tests.tiny import LEAST, SPECS, expected, prompt, saved

SIZES = [1, 2, 4, 8]
LENGTHS = (1, 5, 17, 33, 16, 9, 2, 40)


@pytest.fixture(scope="module", params=SPECS)
def spec(request):
    yield request.param
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def llm(spec):
    """A compiled engine with a graph for each of SIZES, and the number of its compilations."""
    _, folder = saved(spec)
    torch._dynamo.reset()
    counters.clear()
    made = engine(folder)
    made.compilations = counters["stats"]["unique_graphs"]
    return made


def engine(folder, **options):
    model = Model.load(folder, dtype="float32", device="cuda")
    longest = min(256, checked_length(model.config) or 256)
    sizes = {"max_model_len": longest, "max_num_seqs": SIZES[-1], "block_size": 16, "num_gpu_blocks_override": 140}
    return LLM(model, skip_tokenizer_init=True, cudagraph_capture_sizes=SIZES, **sizes, **options)


def greedy(llm, prompts, tokens=12):
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def test_greedy_tokens_are_those_of_transformers(spec, llm):
    reference, _ = saved(spec)
    prompts = [prompt(max(length, LEAST.get(spec, 0)), seed=length) for length in LENGTHS]
    for batch in (1, 2, 3, 8):
        for ids, tokens in zip(prompts, greedy(llm, prompts[:batch])):
            assert tokens == follow(reference, ids, tokens)
    assert llm.llm_engine.runner.graphs.failures == []


def follow(reference, ids, tokens):
    """What the reference chooses at each place of `tokens`, given those before."""
    logits = expected(reference, ids + tokens[:-1])
    return logits[len(ids) - 1 :].argmax(-1).tolist()


@contextmanager
def running(llm, batch):
    """`batch` requests in the middle of their answers, and their slots."""
    core = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    groups = [core.add(str(row), prompt(LENGTHS[row], seed=row), params) for row in range(batch)]
    for _ in range(6):
        core.step()
    core._read_flight()
    torch.cuda.synchronize()
    yield [group.requests[0].slot for group in groups]
    for group in groups:
        core.abort(group)


def states(step):
    return [tensor for layers in step.cache.states.values() for layer in layers for tensor in layer]


class Snapshot:
    """Everything that a forward pass changes, to be put back."""

    def __init__(self, step):
        self._tensors = states(step)
        self._copies = [tensor.clone() for tensor in self._tensors]

    def restore(self):
        for tensor, copy in zip(self._tensors, self._copies):
            tensor.copy_(copy)


@torch.no_grad()
@pytest.mark.parametrize("batch", range(1, SIZES[-1] + 1))
def test_a_replay_equals_the_code_run_directly_bit_for_bit(llm, batch):
    step, graphs = llm.llm_engine.runner.step, llm.llm_engine.runner.graphs
    assert graphs.failures == []
    with running(llm, batch) as slots:
        size = next(size for size in SIZES if size >= batch)
        padded = (*slots, *[0] * (size - batch))
        before = Snapshot(step)
        direct = step.decode_logits(torch.tensor(padded, device="cuda")).clone()

        def replay():
            before.restore()
            graphs._place(slots)
            graphs._forwards[size].graph.replay()
            return graphs.logits_SV[:size].clone()

        assert torch.equal(replay(), direct)
        last_S, length_S = step.tables.last_S, step.tables.length_S
        last_S[0], length_S[0] = step.model.dims.vocab - 1, llm.llm_engine.options.max_model_len
        assert torch.equal(replay()[:batch], direct[:batch]), "padding rows of the largest ids and positions"
        poison(step)
        assert torch.equal(replay()[:batch], direct[:batch]), "NaN in the pad page and the pad slot"
        last_S[0], length_S[0] = 0, 1


def poison(step):
    for layer in step.model.layers:
        for name in ("k_pages", "v_pages"):
            if hasattr(layer, name):
                getattr(layer, name)[0] = float("nan")
    for state in states(step):
        state[0] = float("nan")


def test_two_hundred_steps_neither_recompile_nor_wait_nor_grow(llm):
    core = llm.llm_engine
    for seed in (0, 1):  # the first round meets every batch size once
        params = [SamplingParams(temperature=row % 2, seed=row, max_tokens=20 + 25 * row, ignore_eos=True) for row in range(8)]
        groups = [core.add(str(row), prompt(LENGTHS[row], seed=seed), params[row]) for row in range(8)]
        while any(request.unread == 0 and not request.outputs for group in groups for request in group.requests):
            core.step()
        compiled, allocated = counters["stats"]["unique_graphs"], torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error" if seed else "default")
        steps = 0
        while core.unfinished:
            core.step()
            steps += 1
        torch.cuda.set_sync_debug_mode("default")
    assert steps >= min(190, core.options.max_model_len - max(LENGTHS) - 10)  # a short model ends answers early
    assert counters["stats"]["unique_graphs"] == compiled
    assert torch.cuda.memory_allocated() <= allocated


def test_the_number_of_compilations_is_that_of_kinds_not_of_layers(llm):
    assert 0 < llm.compilations <= 3 * len(set(llm.model.dims.kinds))


def test_drawn_tokens_are_those_of_the_sampler_in_plain_torch(llm):
    step = llm.llm_engine.runner.step
    logits = torch.randn(8, step.model.dims.vocab, device="cuda").bfloat16()
    temperature = torch.tensor([0, 1, 0.5, 2, 0, 1, 1, 0.1], device="cuda")
    seeds, lengths = torch.arange(8, device="cuda"), torch.arange(8, device="cuda") + 5
    for random in (False, True):
        arguments = (logits, temperature, seeds, lengths, step.real_vocab, random, random, False)
        ours, theirs = finish_on(step.device)(*arguments), finish(*arguments)
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[2], theirs[2])
        assert torch.allclose(ours[1], theirs[1], atol=1e-5)


def test_features_that_come_late_are_captured_then(llm):
    before = len(llm.llm_engine.runner.graphs._draws)
    params = SamplingParams(seed=1, top_k=5, repetition_penalty=1.2, logprobs=2, max_tokens=4)
    (output,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4
    assert len(llm.llm_engine.runner.graphs._draws) == before + 1
    assert Features() in {features for _, features in llm.llm_engine.runner.graphs._draws}
