"""Callers that go away, engines that end, requests that fail alone: whoever is left gets what is theirs."""

import asyncio
import multiprocessing
import re
import threading
import time

import pytest
import torch

from flexgen import GenerationError
from flexgen.errors import FlexgenError
from flexgen.runtime.async_engine import AsyncEngine
from flexgen.runtime.requests.params import SamplingParams
from tests.runtime.test_async import LONG, free, last
from tests.runtime.test_engine import assert_all_free, engine, run
from tests.runtime.toy import Toy

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of a loop that is gone
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture
def served():
    toy = Toy()
    engine = AsyncEngine(toy, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4, num_gpu_blocks_override=30)
    yield engine, toy
    engine.close()


class Gate:
    """Holds the engine's thread inside a step until it is opened."""

    def __init__(self, toy):
        self.inside, self.open, forward = threading.Event(), threading.Event(), toy.forward

        def held(*arguments):
            self.inside.set()
            assert self.open.wait(20)
            return forward(*arguments)

        toy.forward = held


async def until(event):
    while not event.is_set():
        await asyncio.sleep(0.001)


# ---------------------------------------------------------------- cancelled


WAITS = {
    "generate": lambda engine: last(engine, [1], LONG, "gone"),
    "abort": lambda engine: engine.abort("unknown"),
    "reset_prefix_cache": lambda engine: engine.reset_prefix_cache(),
}


@pytest.mark.parametrize("method", WAITS)
def test_a_caller_cancelled_while_a_step_runs_leaves_the_others_their_tokens(method, served):
    engine, toy = served
    gate = Gate(toy)

    async def main():
        other = asyncio.create_task(last(engine, [9, 3], LONG, "other"))
        await until(gate.inside)
        gone = asyncio.create_task(WAITS[method](engine))
        await asyncio.sleep(0.01)  # its job is queued behind the step
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        gate.open.set()
        answer = await other
        later = await last(engine, [1], GREEDY, "gone")  # the id is free: nothing was added, or it was aborted
        return answer, later

    answer, later = asyncio.run(asyncio.wait_for(main(), 30))
    assert answer.outputs[0].token_ids == toy.greedy([9, 3], 50)
    assert later.outputs[0].token_ids == toy.greedy([1], 8) and free(engine)


def test_an_add_that_is_cancelled_while_it_runs_leaves_nothing_behind(served):
    engine, toy = served
    inside, go, add = threading.Event(), threading.Event(), engine._engine.add

    def slow(*arguments, **named):
        inside.set()
        assert go.wait(20)
        return add(*arguments, **named)

    async def main():
        engine._engine.add = slow
        gone = asyncio.create_task(last(engine, [1], LONG, "gone"))
        await until(inside)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        go.set()
        engine._engine.add = add
        return await last(engine, [2], GREEDY, "gone")

    assert asyncio.run(asyncio.wait_for(main(), 30)).outputs[0].token_ids == toy.greedy([2], 8)
    assert free(engine) and not engine._streams


def test_a_second_caller_of_an_id_does_not_end_the_first_by_being_refused(served):
    engine, toy = served

    async def main():
        first = asyncio.create_task(last(engine, [5], LONG, "a"))
        await asyncio.sleep(0.005)
        for _ in range(3):
            with pytest.raises(ValueError, match="running already"):
                await last(engine, [6], LONG, "a")
        return await first

    assert asyncio.run(main()).outputs[0].token_ids == toy.greedy([5], 50)


def test_a_caller_whose_loop_is_gone_is_forgotten(served):
    engine, toy = served
    gate = Gate(toy)
    loop = asyncio.new_event_loop()
    gone = loop.create_task(last(engine, [1], LONG, "gone"))
    while not gate.inside.is_set():
        loop.run_until_complete(asyncio.sleep(0.001))
    loop.close()
    gate.open.set()
    answer = asyncio.run(asyncio.wait_for(last(engine, [9], LONG, "here"), 30))
    assert not gone.done()
    assert answer.outputs[0].token_ids == toy.greedy([9], 50) and free(engine)


# ---------------------------------------------------------------- the thread's end


def broken(*arguments):
    raise SystemExit("the machine goes down")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whatever_ends_the_thread_reaches_all_who_wait(served):
    engine, toy = served
    toy.forward = broken

    async def main():
        calls = [*(last(engine, [i], LONG, str(i)) for i in range(3)), engine.reset_prefix_cache()]
        waiting = await asyncio.gather(*calls, return_exceptions=True)
        with pytest.raises(FlexgenError, match="thread ended: SystemExit: the machine goes down"):
            await last(engine, [1], LONG, "later")
        return waiting

    waiting = asyncio.run(asyncio.wait_for(main(), 30))
    ended = [error for error in waiting if isinstance(error, FlexgenError)]
    assert len(ended) >= 3 and all("the machine goes down" in str(error) for error in ended)
    engine.close()


def test_an_error_while_answers_are_delivered_is_one_callers(served):
    engine, toy = served
    hand_over = engine._hand_over

    def failing(stream):
        if stream.request_id == "bad":
            raise LookupError("no such token")
        return hand_over(stream)

    engine._hand_over = failing

    async def main():
        return await asyncio.gather(
            last(engine, [1], LONG, "bad"), last(engine, [2], LONG, "good"), return_exceptions=True
        )

    bad, good = asyncio.run(asyncio.wait_for(main(), 30))
    assert isinstance(bad, LookupError) and good.outputs[0].token_ids == toy.greedy([2], 50) and free(engine)


def test_what_is_queued_behind_close_is_refused(served):
    engine, toy = served
    gate = Gate(toy)

    async def main():
        running = asyncio.create_task(last(engine, [1], LONG, "running"))
        await until(gate.inside)
        before = asyncio.create_task(last(engine, [2], LONG, "before"))
        await asyncio.sleep(0.01)
        closing = threading.Thread(target=engine.close)
        closing.start()
        while not engine._closing:
            await asyncio.sleep(0.001)
        with pytest.raises(FlexgenError, match="closed"):
            await last(engine, [3], LONG, "behind")
        with pytest.raises(FlexgenError, match="closed"):
            await engine.abort("running")
        gate.open.set()
        closing.join()
        return await asyncio.gather(running, before)

    for output in asyncio.run(asyncio.wait_for(main(), 30)):
        assert output.finished and output.outputs[0].finish_reason == "abort"
    assert free(engine)


def test_close_from_the_engines_own_thread_and_twice_does_not_hang(served):
    engine, toy = served
    forward = toy.forward

    def closing(*arguments):
        engine.close()
        return forward(*arguments)

    toy.forward = closing
    output = asyncio.run(asyncio.wait_for(last(engine, [1], LONG, "a"), 30))
    assert output.outputs[0].finish_reason == "abort"
    engine.close()
    engine.close()


def _in_child(engine, results):
    for call in (lambda: asyncio.run(last(engine, [1], LONG, "a")), engine.close, lambda: asyncio.run(engine.abort("a"))):
        try:
            results.put(call())
        except FlexgenError as error:
            results.put(str(error))


def test_a_forked_child_is_told_and_the_parent_goes_on(served):
    engine, toy = served
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    child = fork.Process(target=_in_child, args=(engine, results))
    child.start()
    said = [results.get(timeout=30) for _ in range(3)]
    child.join(30)
    assert all("belongs to process" in text for text in said)
    assert asyncio.run(last(engine, [4], GREEDY, "a")).outputs[0].token_ids == toy.greedy([4], 8)


# ---------------------------------------------------------------- requests that fail alone


def raising(outputs, row):
    if len(outputs) == 3:
        raise KeyError("my table")
    return row


def nan(outputs, row):
    return torch.full_like(row, float("nan")) if len(outputs) == 3 else row


def short(outputs, row):
    return row[:3] if len(outputs) == 3 else row


BAD = {"raises": (raising, "KeyError: 'my table'"), "NaN": (nan, "returned NaN"), "shape": (short, r"of shape \(61,\)")}


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs"])
@pytest.mark.parametrize("processor, why", BAD.values(), ids=BAD.keys())
def test_a_processor_that_fails_ends_its_own_request_alone(processor, why, mode):
    toy = Toy()
    llm = engine(toy, logprobs_mode=mode)
    params = [GREEDY, SamplingParams(temperature=0, max_tokens=8, logits_processors=[processor]), GREEDY]
    first, failed, last = run(llm, [[1], [2], [3]], params)
    assert [first.outputs[0].token_ids, last.outputs[0].token_ids] == [toy.greedy([1], 8), toy.greedy([3], 8)]
    answer = failed.outputs[0]
    assert failed.finished and answer.finish_reason == "error" and answer.token_ids == toy.greedy([2], 3)
    assert re.search(why, answer.error)
    assert first.outputs[0].error is None
    assert_all_free(llm)


def test_an_option_raises_and_the_exception_holds_the_answers(caplog):
    toy = Toy()
    llm = engine(toy)
    params = [GREEDY, SamplingParams(max_tokens=8, logits_processors=[raising])]
    with pytest.raises(GenerationError, match=r"1 of 2 prompts failed: token 3 of request 1 .*my table") as caught:
        llm.generate([[1], [2]], params, use_tqdm=False, raise_on_error=True)
    good, bad = caught.value.outputs
    assert good.outputs[0].token_ids == toy.greedy([1], 8) and bad.outputs[0].finish_reason == "error"
    llm.generate([[1], [2]], params, use_tqdm=False)
    assert "1 of 2 prompts ended with finish_reason" in caplog.text
    assert [output.outputs[0].finish_reason for output in llm.stream([[2]], params[1])][-1] == "error"
    assert_all_free(llm)


def test_among_n_answers_the_others_are_finished():
    toy, seen = Toy(), []

    def once(outputs, row):
        seen.append(len(outputs))
        if len(outputs) == 2 and seen.count(2) == 1:
            raise RuntimeError("once")
        return row

    llm = engine(toy)
    (output,) = run(llm, [[1]], SamplingParams(n=3, seed=1, max_tokens=6, ignore_eos=True, logits_processors=[once]))
    assert sorted(answer.finish_reason for answer in output.outputs) == ["error", "length", "length"]
    assert_all_free(llm)


def test_an_async_caller_gets_its_own_failure_with_the_answer_so_far(served):
    engine, toy = served

    async def main():
        bad = SamplingParams(temperature=0, max_tokens=8, logits_processors=[raising])
        return await asyncio.gather(
            last(engine, [1], LONG, "a"), last(engine, [2], bad, "b"), last(engine, [3], LONG, "c"), return_exceptions=True
        )

    first, failed, third = asyncio.run(main())
    assert [first.outputs[0].token_ids, third.outputs[0].token_ids] == [toy.greedy([1], 50), toy.greedy([3], 50)]
    assert isinstance(failed, GenerationError) and "my table" in str(failed)
    assert failed.outputs[0].outputs[0].token_ids == toy.greedy([2], 3)
    deadline = time.monotonic() + 5
    while not free(engine) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert free(engine)
