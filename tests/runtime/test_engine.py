"""The engine as a whole on the toy model: every request gets the tokens of a run alone, and everything is given back."""

import logging

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexgen.runtime.llm import LLM
from flexgen.runtime.requests.params import SamplingParams
from tests.runtime.toy import Toy

torch.set_num_threads(1)

KINDS = {
    "full": ("full", "full"),
    "window": ("full", "sliding", "shared"),
    "windows only": ("sliding", "sliding"),
    "state": ("recurrent", "full"),
}


def engine(toy=None, **options):
    defaults = {"max_model_len": 64, "max_num_seqs": 4, "block_size": 4, "num_gpu_blocks_override": 64}
    return LLM(toy or Toy(), skip_tokenizer_init=True, **{**defaults, "max_num_batched_tokens": 64, **options})


def run(llm, prompts, params):
    return llm.generate(prompts, params, use_tqdm=False)


def assert_all_free(llm):
    metrics = llm.metrics()
    assert metrics["free_blocks"] == metrics["total_blocks"]
    assert metrics["free_slots"] == metrics["total_slots"]
    for pool in llm.llm_engine.tables.pools:
        assert pool.free == pool.pages and not any(pool._users)
    assert not llm.llm_engine._groups and not llm.llm_engine.unfinished


@st.composite
def workloads(draw):
    """Requests with shared and distinct prompts, aborts, and an engine just large enough for the largest of them."""
    stems = draw(st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=30), min_size=1, max_size=3))
    requests = []
    for _ in range(draw(st.integers(1, 9))):
        stem = draw(st.sampled_from(stems))
        prompt = stem[: draw(st.integers(1, len(stem)))] + draw(st.lists(st.integers(0, 60), max_size=4))
        params = {
            "max_tokens": draw(st.integers(1, 12)),
            "temperature": draw(st.sampled_from([0, 1, 0.7])),
            "top_k": draw(st.sampled_from([0, 5])),
            "repetition_penalty": draw(st.sampled_from([1.0, 1.0, 1.3])),
            "stop_token_ids": draw(st.lists(st.integers(0, 60), max_size=6)),
            "min_tokens": draw(st.integers(0, 1)),
        }
        requests.append((prompt, params, draw(st.none() | st.integers(1, 12))))
    block, slots = draw(st.integers(1, 8)), draw(st.integers(1, 5))
    largest = max(-(-(len(p) + q["max_tokens"] - 1) // block) for p, q, _ in requests)
    sizes = {
        "block_size": block,
        "max_num_seqs": slots,
        "num_gpu_blocks_override": largest + draw(st.integers(0, 2 * largest)),
        "max_num_batched_tokens": slots + draw(st.integers(0, 40)),
        "enable_prefix_caching": draw(st.booleans()),
    }
    return requests, sizes


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS.keys())
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(workload=workloads())
def test_any_mix_gives_the_tokens_of_a_run_alone(kinds, workload):
    requests, sizes = workload
    toy = Toy(kinds=kinds)
    alone = engine(toy, max_num_seqs=1, enable_prefix_caching=False)
    expected = [run(alone, [p], SamplingParams(seed=i, logprobs=0, **q))[0] for i, (p, q, _) in enumerate(requests)]
    llm = engine(toy, **sizes)
    groups = [
        llm.llm_engine.add(str(i), p, SamplingParams(seed=i, logprobs=0, **q)) for i, (p, q, _) in enumerate(requests)
    ]
    aborts = [step for _, _, step in requests]
    steps = 0
    while llm.llm_engine.unfinished:
        llm.llm_engine.step()
        steps += 1
        for group, step in zip(groups, aborts):
            if step == steps:
                llm.llm_engine.abort(group)
        assert steps < 40 * len(requests) * 50, "the engine does not come to an end"
    for group, want, aborted in zip(groups, expected, aborts):
        got, want = group.output().outputs[0], want.outputs[0]
        assert len(got.logprobs) == len(got.token_ids)
        if got.finish_reason == "abort":
            assert aborted is not None
            want.token_ids, want.logprobs = want.token_ids[: len(got.token_ids)], want.logprobs[: len(got.token_ids)]
        else:
            assert (got.finish_reason, got.stop_reason) == (want.finish_reason, want.stop_reason)
        assert got.token_ids == want.token_ids
        for token, mine, theirs in zip(got.token_ids, got.logprobs, want.logprobs):
            assert mine[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4)
    llm.llm_engine.step()
    assert_all_free(llm)


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("block", [1, 4, 5, 16, 128])
def test_greedy_tokens_are_those_of_whole_prefills(kinds, block):
    toy = Toy(kinds=kinds)
    prompts = [[7] * n for n in (1, 3, 4, 5, 8, 15, 16, 17, 40)] + [[1, 2, 3] * 5]
    llm = engine(toy, block_size=block, max_num_batched_tokens=13, max_num_seqs=10)
    outputs = run(llm, prompts, SamplingParams(temperature=0, max_tokens=9))
    assert [o.outputs[0].token_ids for o in outputs] == [toy.greedy(prompt, 9) for prompt in prompts]
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert_all_free(llm)


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9])
def test_windows_around_the_page_size(window):
    toy = Toy(kinds=("sliding", "full"), window=window)
    llm = engine(toy, max_num_batched_tokens=6)
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6] * 3, [2, 7, 1, 8] * 4, [2, 7, 1, 8] * 4 + [9]]
    outputs = run(llm, prompts, SamplingParams(temperature=0, max_tokens=12))
    assert [o.outputs[0].token_ids for o in outputs] == [toy.greedy(prompt, 12) for prompt in prompts]
    again = run(llm, prompts, SamplingParams(temperature=0, max_tokens=12))
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in outputs]
    assert again[0].num_cached_tokens == 20  # 24 tokens: the last one is computed again, so its block is
    assert_all_free(llm)


def test_a_window_group_frees_what_lies_behind_it():
    llm = engine(Toy(kinds=("sliding", "full"), window=4), block_size=4, max_num_seqs=1, max_num_batched_tokens=4)
    group = llm.llm_engine.add("0", list(range(40)), SamplingParams(max_tokens=20, temperature=0))
    _, window = llm.llm_engine.tables.pools
    least = window.free
    while llm.llm_engine.unfinished:
        llm.llm_engine.step()
        least = min(least, window.free)
    assert group.finished and window.pages == 4 and least >= window.pages - 3


@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_last_lengths_below_max_model_len(length):
    toy = Toy()
    llm = engine(toy, max_model_len=20)
    prompt = list(range(20 - length))
    (output,) = run(llm, [prompt], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert output.outputs[0].token_ids == toy.greedy(prompt, length)
    assert output.outputs[0].finish_reason == "length"


def test_a_prompt_that_cannot_be_served_is_refused_with_the_numbers_and_the_others_lose_nothing():
    toy = Toy()
    llm = engine(toy, max_model_len=40, num_gpu_blocks_override=5)
    held = llm.llm_engine.add("held", [1, 2, 3], SamplingParams(temperature=0, max_tokens=8))
    llm.llm_engine.step()
    with pytest.raises(ValueError, match=r"40 tokens and max_model_len is 40"):
        run(llm, [[1], [1] * 40], None)
    with pytest.raises(ValueError, match=r"15 prompt tokens and up to 10 new ones take 6 blocks of 4.*there are 5"):
        run(llm, [[1] * 15], SamplingParams(max_tokens=10))
    with pytest.raises(ValueError, match="empty"):
        run(llm, [[1], []], None)
    with pytest.raises(ValueError, match="61 is out of range"):
        run(llm, [[61]], None)
    with pytest.raises(ValueError, match="max_tokens=0"):
        SamplingParams(max_tokens=0)
    while llm.llm_engine.unfinished:
        llm.llm_engine.step()
    assert held.output().outputs[0].token_ids == toy.greedy([1, 2, 3], 8)
    assert run(llm, [], None) == []
    assert_all_free(llm)


def test_n_slots_decode_in_one_step():
    llm = engine(max_num_seqs=8)
    run(llm, [[i] for i in range(8)], SamplingParams(max_tokens=11, ignore_eos=True))
    # one-token prompts enter in the first step, which draws the first token
    assert llm.metrics()["decode_steps"] == 10 and llm.metrics()["prefill_steps"] == 1


def test_equal_prompts_of_one_call_prefill_once():
    toy = Toy()
    llm = engine(toy, max_num_seqs=8)
    prompt = list(range(24))
    outputs = run(llm, [prompt] * 8, SamplingParams(temperature=0, max_tokens=4))
    assert all(output.outputs[0].token_ids == toy.greedy(prompt, 4) for output in outputs)
    # the first computes 24 tokens; seven reuse 5 of its 6 blocks, since one token must be computed
    assert llm.metrics()["prefill_tokens"] == 24 + 7 * 4
    assert llm.metrics()["prefix_cache_hit_tokens"] == 7 * 20
    assert [output.num_cached_tokens for output in outputs] == [0] + [20] * 7


def test_n_answers_share_their_prompt_and_use_seed_plus_index():
    llm = engine(max_num_seqs=8)
    prompt = list(range(16))
    (output,) = run(llm, [prompt], SamplingParams(n=4, seed=5, max_tokens=6, ignore_eos=True))
    singles = [run(llm, [prompt], SamplingParams(seed=5 + i, max_tokens=6, ignore_eos=True))[0] for i in range(4)]
    assert [answer.token_ids for answer in output.outputs] == [single.outputs[0].token_ids for single in singles]
    assert [answer.index for answer in output.outputs] == [0, 1, 2, 3]


def test_cached_prefixes_belong_to_one_version_of_the_weights():
    toy = Toy()
    llm = engine(toy)
    prompt, params = list(range(20)), SamplingParams(temperature=0, max_tokens=5)
    run(llm, [prompt], params)
    toy.embed = Toy(seed=9).embed
    toy.weight_version += 1
    (output,) = run(llm, [prompt], params)
    assert output.num_cached_tokens == 0 and output.outputs[0].token_ids == toy.greedy(prompt, 5)
    assert run(llm, [prompt], params)[0].num_cached_tokens == 16
    assert llm.reset_prefix_cache()
    assert run(llm, [prompt], params)[0].num_cached_tokens == 0


def test_prefix_caching_is_off_with_recurrent_state_and_says_so(caplog):
    with caplog.at_level(logging.INFO, logger="flexgen"):
        llm = engine(Toy(kinds=("recurrent", "full")))
    assert "prefix caching is off" in caplog.text and "prefix caching: off: this model has recurrent state" in llm.report()
    caplog.clear()
    engine(Toy(kinds=("recurrent", "full")), enable_prefix_caching=True)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    caplog.clear()
    engine(Toy(kinds=("recurrent", "full")), enable_prefix_caching=False)
    assert not caplog.records
    outputs = run(llm, [list(range(20))] * 3, SamplingParams(temperature=0, max_tokens=3))
    assert all(output.num_cached_tokens == 0 for output in outputs)


def test_unseeded_requests_differ_and_the_engine_seed_repeats_them():
    def draw(seed):
        outputs = run(engine(seed=seed), [[1]] * 3, SamplingParams(max_tokens=12, ignore_eos=True))
        return [output.outputs[0].token_ids for output in outputs]

    state = torch.get_rng_state()
    first = draw(1)
    assert torch.equal(state, torch.get_rng_state())
    assert first == draw(1) != draw(2)
    assert len({tuple(tokens) for tokens in first}) == 3


def test_a_timeout_keeps_what_was_generated(monkeypatch):
    llm = engine()
    clock = [0.0]
    monkeypatch.setattr("flexgen.runtime.engine.time.monotonic", lambda: clock[0])
    group = llm.llm_engine.add("0", [1, 2], SamplingParams(max_tokens=50, ignore_eos=True, logprobs=0), timeout=3)
    for _ in range(5):
        llm.llm_engine.step()
        clock[0] += 1
    answer = group.output().outputs[0]
    assert (answer.finish_reason, answer.stop_reason) == ("abort", "timeout")
    assert 0 < len(answer.token_ids) == len(answer.logprobs) < 5
    llm.llm_engine.step()
    assert_all_free(llm)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_generate_frees_everything(error):
    toy = Toy()
    llm = engine(toy)
    forward, calls = toy.forward, [0]

    def interrupted(*arguments):
        calls[0] += 1
        if calls[0] == 4:
            raise error
        return forward(*arguments)

    toy.forward = interrupted
    with pytest.raises(error):
        run(llm, [[1, 2, 3]] * 6, SamplingParams(max_tokens=20, ignore_eos=True))
    assert_all_free(llm)
    toy.forward = forward
    (output,) = run(llm, [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=5))
    assert output.outputs[0].token_ids == toy.greedy([1, 2, 3], 5)


def test_logits_that_are_nan_end_the_request_and_name_it():
    toy = Toy()
    llm = engine(toy)
    toy.logits = lambda hidden: torch.full((len(hidden), 61), float("nan"))
    (output,) = run(llm, [[1, 2]], SamplingParams())
    assert output.outputs[0].finish_reason == "error" and "request 0 has no probability" in output.outputs[0].error
    assert_all_free(llm)


def test_fifty_calls_leave_everything_free():
    llm = engine(num_gpu_blocks_override=12)
    for call in range(50):
        params = SamplingParams(max_tokens=1 + call % 13, stop_token_ids=[call])
        run(llm, [[call % 61] * (1 + call % 9)] * 5, params)
        llm.llm_engine.step()
        assert_all_free(llm)
    assert llm.metrics()["finished_requests"] == 250


def test_metrics_add_up():
    llm = engine(max_num_batched_tokens=8)
    run(llm, [[1] * 20, [2] * 3], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    metrics = llm.metrics()
    assert metrics["prefill_tokens"] == 23 and metrics["generated_tokens"] == 10
    assert metrics["prefill_steps"] == 3 and metrics["decode_steps"] > 0
    assert metrics["step_seconds"] > 0 and metrics["lock_step_steps"] == 0 and metrics["dropped_tokens"] == 0


def test_the_token_after_an_eos_is_dropped_and_never_cached():
    toy = Toy()
    tokens = toy.greedy([1, 2, 3], 9)
    eos = next(token for token in tokens[3:] if token not in tokens[:3])
    llm = engine(toy, block_size=1)
    (output,) = run(llm, [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[eos], logprobs=0))
    answer = output.outputs[0]
    assert answer.token_ids == tokens[: tokens.index(eos) + 1] and answer.stop_reason == eos
    assert len(answer.logprobs) == len(answer.token_ids)
    llm.llm_engine.step()
    assert llm.metrics()["dropped_tokens"] == 1
    # the eos itself was fed to the step that was dropped; its block must not be found
    assert len(llm.llm_engine.tables.pools[0]._page_of) <= 3 + len(answer.token_ids) - 1
