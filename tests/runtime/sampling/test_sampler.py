"""The sampler against closed forms and transformers' logits processors, row by row."""

import itertools

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from flexgen.runtime.requests.params import SamplingParams
from flexgen.runtime.requests.request import Request
from flexgen.runtime.requests.stops import StopRules
from flexgen.runtime.sampling.randoms import exponential_noise, philox2x32
from flexgen.runtime.sampling.sampler import Features, SamplingTables, sample

torch.set_num_threads(1)
VOCAB = 24
NO_STOPS = StopRules(None, frozenset(), (), False, 0, 100)


def request(slot, prompt=(1, 2), outputs=(), seed=0, stop_ids=(), banned=(), **params):
    made = Request(slot, list(prompt), SamplingParams(**params), seed, NO_STOPS, stop_ids, banned)
    made.tokens += outputs
    made.slot = slot
    return made


def draw(logits, requests, raw=False, real_vocab=VOCAB, lengths=None, tables=None):
    if tables is None:
        tables = SamplingTables(len(requests), VOCAB, torch.device("cpu"))
        tables.enter(requests)
    slots = torch.tensor([each.slot for each in requests])
    lengths = torch.tensor([len(each.tokens) for each in requests]) if lengths is None else lengths
    features = Features.of(requests, VOCAB)
    return sample(logits, slots, lengths, tables, features, real_vocab, raw)


def full_logprobs(sampled):
    """(R, V) from the top logprobs, which cover the vocabulary."""
    return torch.full_like(sampled.top_logprobs_RK, 0).scatter(1, sampled.top_ids_RK, sampled.top_logprobs_RK)


def closed_form(logits, temperature, top_k, top_p, min_p):
    """The same rules in float64 numpy, one row, written from their definitions."""
    x = np.asarray(logits, dtype=np.float64) / temperature
    probs = np.exp(x - x.max())
    x = np.where(probs < min_p * probs.max(), -np.inf, x)
    if top_k > 0:
        x = np.where(x < np.sort(x)[-min(top_k, len(x))], -np.inf, x)
    probs = np.exp(x - x.max())
    probs /= probs.sum()
    if top_p < 1:
        order = np.argsort(-probs, kind="stable")
        before = np.cumsum(probs[order]) - probs[order]
        x[order[before >= top_p]] = -np.inf
        probs = np.exp(x - x.max())
        probs /= probs.sum()
    with np.errstate(divide="ignore"):
        return np.log(probs)


GRID = list(itertools.product([0.3, 1.0, 2.5], [0, 1, 5, 100], [1.0, 0.9, 0.4, 1e-3], [0.0, 0.1, 0.8]))


def test_logprobs_are_the_closed_form_for_every_combination_in_one_batch():
    logits = torch.randn(len(GRID), VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    requests = [
        request(i + 1, temperature=t, top_k=k, top_p=p, min_p=m, logprobs=-1, seed=i)
        for i, (t, k, p, m) in enumerate(GRID)
    ]
    sampled = draw(logits, requests)
    mine = full_logprobs(sampled)
    for row, settings in enumerate(GRID):
        expected = torch.tensor(closed_form(logits[row], *settings), dtype=torch.float32)
        torch.testing.assert_close(mine[row], expected, atol=2e-5, rtol=0)
    chosen = mine.gather(1, sampled.tokens_R[:, None])[:, 0]
    assert torch.equal(chosen, sampled.logprobs_R) and chosen.isfinite().all()
    ranks = (mine > chosen[:, None]).sum(1) + 1
    assert torch.equal(ranks, sampled.ranks_R)


@pytest.mark.parametrize("settings", GRID[::5])
def test_logprobs_match_transformers_warpers(settings):
    temperature, top_k, top_p, min_p = settings
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    expected = logits
    for warper in warpers:
        expected = warper(None, expected)
    sampled = draw(logits, [request(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, logprobs=-1)])
    torch.testing.assert_close(full_logprobs(sampled), expected.log_softmax(-1), atol=2e-5, rtol=0)


@pytest.mark.parametrize("settings", [(1.0, 0, 1.0, 0.0), (0.7, 6, 0.9, 0.0), (1.6, 0, 0.8, 0.05)])
def test_twenty_thousand_draws_follow_the_distribution(settings):
    temperature, top_k, top_p, min_p = settings
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2))
    count = 20_000
    one = request(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=77)
    tables = SamplingTables(1, VOCAB, torch.device("cpu"))
    tables.enter([one])
    sampled = sample(
        logits.expand(count, -1), torch.ones(count, dtype=torch.int64), torch.arange(count), tables,
        Features.of([one], VOCAB), VOCAB,
    )  # fmt: skip
    probs = torch.tensor(closed_form(logits[0], *settings)).exp()
    counts = torch.bincount(sampled.tokens_R, minlength=VOCAB)
    assert counts[probs == 0].sum() == 0
    kept = probs > 0
    expected = probs[kept] * count
    chi_square = ((counts[kept] - expected) ** 2 / expected).sum()
    freedom = int(kept.sum()) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5  # four standard deviations


def test_rows_do_not_depend_on_their_neighbours():
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    kinds = [
        {"temperature": 0, "logprobs": 3},
        {"temperature": 1.0, "seed": 4, "logprobs": 3},
        {"temperature": 0.5, "top_p": 0.6, "min_p": 0.1, "seed": 5, "logprobs": 3},
        {"repetition_penalty": 1.7, "frequency_penalty": 0.5, "outputs": [3, 3, 4], "seed": 6, "logprobs": 3},
        {"logit_bias": {3: 5.0}, "min_tokens": 2, "stop_ids": (0, 1), "seed": 7, "logprobs": 3},
    ]
    together = draw(logits, [request(i + 1, **kind) for i, kind in enumerate(kinds)])
    for row, kind in enumerate(kinds):
        alone = draw(logits[row : row + 1], [request(1, **kind)])
        assert alone.tokens_R[0] == together.tokens_R[row]
        assert alone.logprobs_R[0] == together.logprobs_R[row]
        assert torch.equal(alone.top_logprobs_RK[0], together.top_logprobs_RK[row])


def test_greedy_is_the_argmax_and_ignores_truncation():
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4))
    greedy = [request(i + 1, temperature=0, top_k=1, top_p=0.1, min_p=0.9, logprobs=-1) for i in range(2)]
    sampled = draw(logits, [*greedy, request(3, top_k=2, logprobs=-1)])
    assert torch.equal(sampled.tokens_R[:2], logits[:2].argmax(-1))
    torch.testing.assert_close(full_logprobs(sampled)[:2], logits[:2].log_softmax(-1))


def test_repetition_penalty_is_transformers_and_the_others_are_openai():
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(5)) * 2
    seen = {"prompt": [1, 2, 2], "outputs": [2, 7, 7, 9], "temperature": 0, "logprobs": -1}
    ids = torch.tensor([[1, 2, 2, 2, 7, 7, 9]])
    expected = RepetitionPenaltyLogitsProcessor(1.4)(ids, logits).log_softmax(-1)
    sampled = draw(logits, [request(1, repetition_penalty=1.4, **seen)])
    torch.testing.assert_close(full_logprobs(sampled), expected)
    counts = torch.bincount(torch.tensor(seen["outputs"]), minlength=VOCAB)
    expected = (logits - 0.7 * counts - 0.3 * (counts > 0)).log_softmax(-1)
    sampled = draw(logits, [request(1, frequency_penalty=0.7, presence_penalty=0.3, **seen)])
    torch.testing.assert_close(full_logprobs(sampled), expected)


def test_penalty_counts_take_the_tokens_as_they_are_drawn():
    one = request(1, temperature=0, presence_penalty=2.0)
    tables = SamplingTables(1, VOCAB, torch.device("cpu"))
    assert tables.counts_SV is None
    tables.enter([one])
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 6] = 1.5, 1.0
    drawn = [int(draw(logits, [one], tables=tables).tokens_R) for _ in range(3)]
    assert drawn[:2] == [5, 6] and drawn[2] not in (5, 6)


def test_allowed_ids_bias_bad_words_and_padded_vocabulary():
    logits = torch.zeros(1, VOCAB)
    bound = {"logprobs": -1, "seed": 1}
    sampled = draw(logits, [request(1, allowed_token_ids=[3, 4, 5], logit_bias={4: 2.0}, banned=(5,), **bound)])
    expected = torch.full((1, VOCAB), float("-inf"))
    expected[0, 3:5] = torch.tensor([0.0, 2.0]).log_softmax(-1)
    torch.testing.assert_close(full_logprobs(sampled), expected)
    sampled = draw(logits, [request(1, **bound)], real_vocab=20)
    assert (full_logprobs(sampled)[0, 20:] == float("-inf")).all()
    torch.testing.assert_close(full_logprobs(sampled)[0, :20], torch.full((20,), -np.log(20.0), dtype=torch.float32))


def test_min_tokens_bars_stop_tokens_until_then():
    logits = torch.zeros(1, VOCAB)
    logits[0, 9] = 5
    bound = {"temperature": 0, "min_tokens": 2, "stop_ids": (9,)}
    assert draw(logits, [request(1, outputs=[3], **bound)]).tokens_R != 9
    assert draw(logits, [request(1, outputs=[3, 3], **bound)]).tokens_R == 9


def test_raw_logprobs_are_the_models_and_the_draw_is_not():
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(6))
    sampled = draw(logits, [request(1, temperature=0.2, top_k=1, logit_bias={3: 50.0}, logprobs=-1)], raw=True)
    assert sampled.tokens_R == 3
    torch.testing.assert_close(full_logprobs(sampled), logits.log_softmax(-1))


def test_a_slot_forgets_the_request_before():
    tables = SamplingTables(1, VOCAB, torch.device("cpu"))
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(7))
    heavy = {"allowed_token_ids": [1], "min_tokens": 3, "stop_ids": (2,), "repetition_penalty": 2.0, "outputs": [4], "top_k": 1}
    for settings in (heavy, {"logprobs": -1, "repetition_penalty": 1.2, "logit_bias": {1: 0.1}, "min_tokens": 1}):
        one = request(1, **settings)
        tables.enter([one])
    expected = draw(logits, [one])
    torch.testing.assert_close(full_logprobs(draw(logits, [one], tables=tables)), full_logprobs(expected))


def test_philox_gives_the_published_answers():
    """Known answers of the Random123 distribution (kat_vectors, philox2x32)."""
    zero = torch.zeros(1, dtype=torch.int64)
    assert [int(word) for word in philox2x32(zero, zero, zero, rounds=10)] == [0xFF1DAE59, 0x6CD10DF2]
    ones = zero + 0xFFFFFFFF
    assert [int(word) for word in philox2x32(ones, ones, ones, rounds=7)] == [0xAB302C4D, 0x3DC9D239]


def test_noise_is_exponential_and_streams_are_independent():
    seeds = torch.arange(-500, 500)
    noise = exponential_noise(seeds, torch.full((1000,), 3), 501)
    assert noise.min() > 0 and noise.isfinite().all()
    assert abs(noise.mean() - 1) < 0.01 and abs(noise.var() - 1) < 0.02
    assert abs(torch.corrcoef(torch.stack((noise[:-1].flatten(), noise[1:].flatten())))[0, 1]) < 0.01
    shifted = exponential_noise(seeds, torch.full((1000,), 4), 501)
    assert abs(torch.corrcoef(torch.stack((noise.flatten(), shifted.flatten())))[0, 1]) < 0.01
    assert torch.equal(exponential_noise(seeds[7:8], torch.tensor([3]), 501)[0], noise[7])
