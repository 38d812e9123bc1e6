"""Many callers for long: they cancel, leave and come back, engines close under them, pools are small; the others notice nothing."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from flexgen.errors import FlexgenError
from flexgen.runtime.async_engine import AsyncEngine
from flexgen.runtime.requests.params import RequestOutputKind, SamplingParams
from tests.runtime.test_engine import KINDS, assert_all_free, engine, run
from tests.runtime.toy import Toy

torch.set_num_threads(1)
CALLERS = 64


def work(rng, count):
    """Requests of many kinds, some with prompts that others begin with."""
    stems = [[rng.randrange(61) for _ in range(rng.randint(1, 20))] for _ in range(6)]
    requests = []
    for seed in range(count):
        prompt = rng.choice(stems) + [rng.randrange(61) for _ in range(rng.randint(0, 6))]
        params = {
            "max_tokens": rng.randint(1, 14), "temperature": rng.choice((0, 1)), "seed": seed, "ignore_eos": True,
            "logprobs": rng.choice((None, 0, 2)), "repetition_penalty": rng.choice((1.0, 1.3)),
            "output_kind": rng.choice(list(RequestOutputKind)),
        }  # fmt: skip
        if rng.random() < 0.05:
            params["logits_processors"] = [lambda outputs, row: row]
        requests.append((prompt, SamplingParams(**params)))
    return requests


async def tokens_of(served, prompt, params, request_id):
    tokens = []
    async for output in served.generate(prompt, params, request_id):
        new = output.outputs[0].token_ids
        tokens = tokens + new if params.output_kind is RequestOutputKind.DELTA else new
    return tokens, output.outputs[0].finish_reason


async def caller(served, rng, requests, results):
    """Serve requests one after another; some are cancelled at a random time, some aborted, some left after an output."""
    while requests:
        index, (prompt, params) = requests.pop()
        task = asyncio.ensure_future(tokens_of(served, prompt, params, str(index)))
        fate = rng.random()
        if fate < 0.2:
            await asyncio.sleep(rng.random() * 0.02)
            task.cancel()
        elif fate < 0.3:
            await asyncio.sleep(rng.random() * 0.02)
            await served.abort(str(index))
        elif fate < 0.35:
            stream = served.generate(prompt, params, f"left {index}")
            async for _ in stream:
                break
            await stream.aclose()
        try:
            results[index] = await task
        except asyncio.CancelledError:
            results[index] = None


def soak(kinds, count, seed):
    rng, toy = random.Random(seed), Toy(kinds=kinds)
    requests = work(rng, count)
    sizes = {"max_num_seqs": 8, "block_size": 4, "num_gpu_blocks_override": 13, "max_num_batched_tokens": 24, "max_model_len": 64}
    served = AsyncEngine(toy, skip_tokenizer_init=True, **sizes)
    results = {}

    async def main():
        waiting = list(enumerate(requests))
        await asyncio.gather(*(caller(served, rng, waiting, results) for _ in range(CALLERS)))
        await served.abort("nobody")  # whatever was left behind it has been done

    asyncio.run(asyncio.wait_for(main(), 600))
    preemptions, core = served.metrics()["preemptions"], served._llm
    assert not served._streams
    served.close()
    core.llm_engine.step()
    assert_all_free(core)
    finished = {index: result for index, result in results.items() if result is not None and result[1] != "abort"}
    assert len(results) == count and len(finished) > count / 2 and preemptions > 0
    alone = engine(toy, max_num_seqs=1, enable_prefix_caching=False)
    for index, (tokens, reason) in finished.items():
        prompt, params = requests[index]
        (wanted,) = run(alone, [prompt], params)
        assert (tokens, reason) == (wanted.outputs[0].token_ids, wanted.outputs[0].finish_reason), index


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS.keys())
def test_many_callers_of_a_small_engine(kinds):
    soak(kinds, 150, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS.keys())
def test_many_callers_of_a_small_engine_for_long(kinds):
    soak(kinds, 2000, seed=2)


def test_engines_that_close_under_their_callers():
    for seed in range(12):
        rng, toy = random.Random(seed), Toy()
        served = AsyncEngine(toy, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4, num_gpu_blocks_override=26)

        async def main(served=served, rng=rng):
            calls = [tokens_of(served, prompt, params, str(i)) for i, (prompt, params) in enumerate(work(rng, CALLERS))]
            tasks = [asyncio.ensure_future(call) for call in calls]
            await asyncio.sleep(rng.random() * 0.1)
            for task in rng.sample(tasks, 9):
                task.cancel()
            await asyncio.to_thread(served.close)
            return await asyncio.gather(*tasks, return_exceptions=True)

        for result in asyncio.run(asyncio.wait_for(main(), 60)):
            closed = isinstance(result, FlexgenError) and "closed" in str(result)
            assert isinstance(result, tuple | asyncio.CancelledError) or closed, result
        served._llm.llm_engine.step()
        assert_all_free(served._llm)
