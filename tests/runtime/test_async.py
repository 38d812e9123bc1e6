"""AsyncEngine: many callers, aborts, errors, and a thread that survives them."""

import asyncio
import functools
import operator

import pytest
import torch

from flexgen.errors import FlexgenError
from flexgen.runtime.async_engine import AsyncEngine
from flexgen.runtime.requests.params import RequestOutputKind, SamplingParams
from tests.runtime.toy import Toy

torch.set_num_threads(1)
LONG = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)


@pytest.fixture
def served():
    toy = Toy()
    engine = AsyncEngine(toy, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4, num_gpu_blocks_override=30)
    yield engine, toy
    engine.close()


def free(engine):
    metrics = engine.metrics()
    return metrics["free_slots"] == metrics["total_slots"] and metrics["free_blocks"] == metrics["total_blocks"]


async def last(engine, prompt, params, request_id):
    async for output in engine.generate(prompt, params, request_id):
        result = output
    return result


def test_many_callers_get_their_own_answers(served):
    engine, toy = served

    async def main():
        return await asyncio.gather(*(last(engine, [i, 3], LONG, str(i)) for i in range(12)))

    for i, output in enumerate(asyncio.run(main())):
        assert output.outputs[0].token_ids == toy.greedy([i, 3], 50) and output.request_id == str(i)
    assert free(engine)


def test_outputs_come_as_they_grow(served):
    engine, toy = served

    async def main():
        params = SamplingParams(max_tokens=9, temperature=0, output_kind=RequestOutputKind.DELTA)
        return [output.outputs[0].token_ids async for output in engine.generate([4], params, "a")]

    parts = asyncio.run(main())
    assert len(parts) == 9 and functools.reduce(operator.iadd, parts, []) == toy.greedy([4], 9)


def test_abort_ends_one_request_and_leaving_early_ends_it_too(served):
    engine, _ = served

    async def main():
        other = asyncio.create_task(last(engine, [9], LONG, "other"))
        async for output in engine.generate([1], LONG, "a"):
            if not output.finished and len(output.outputs[0].token_ids) == 3:
                await engine.abort("a")
        stream = engine.generate([2], LONG, "b")
        async for _ in stream:
            break
        await stream.aclose()
        await engine.abort("unknown")
        return output, await other

    output, other = asyncio.run(main())
    assert output.outputs[0].finish_reason == "abort" and 3 <= len(output.outputs[0].token_ids) < 50
    assert len(other.outputs[0].token_ids) == 50 and free(engine)


def test_a_request_that_cannot_be_served_is_the_callers_error_alone(served):
    engine, _ = served

    async def main():
        results = await asyncio.gather(
            last(engine, [1], LONG, "a"), last(engine, [2], LONG, "a"), last(engine, [], LONG, "b"), return_exceptions=True
        )
        with pytest.raises(NotImplementedError):
            await last(engine, {"prompt_token_ids": [1], "image": 3}, LONG, "c")
        return results

    first, twice, empty = asyncio.run(main())
    assert len(first.outputs[0].token_ids) == 50
    assert "request_id='a' is running already" in str(twice) and "empty" in str(empty)


def test_a_failing_step_reaches_every_caller_and_the_engine_goes_on(served):
    engine, toy = served
    forward = toy.forward

    def broken(*arguments):
        raise RuntimeError("the device is gone")

    async def main():
        toy.forward = broken
        results = await asyncio.gather(*(last(engine, [1], LONG, str(i)) for i in range(3)), return_exceptions=True)
        toy.forward = forward
        return results, await last(engine, [1, 2], LONG, "0")

    errors, after = asyncio.run(main())
    assert all("the device is gone" in str(error) for error in errors)
    assert after.outputs[0].token_ids == toy.greedy([1, 2], 50) and free(engine)


def test_a_closed_engine_says_so():
    engine = AsyncEngine(Toy(), skip_tokenizer_init=True, max_model_len=64, num_gpu_blocks_override=30)
    engine.close()
    with pytest.raises(FlexgenError, match="closed"):
        asyncio.run(last(engine, [1], LONG, "a"))
