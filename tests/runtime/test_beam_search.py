"""Beam search against every answer there is, scored by transformers' rule on the model's own logprobs."""

from __future__ import annotations

import itertools

import pytest
import torch
from tiny import reference, tiny_config

from flexgen import LLM, BeamSearchParams
from flexgen.verify.reference import logits, save

VOCAB, PROMPT = 11, [3, 5, 7]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    oracle = reference(tiny_config("llama", vocab_size=VOCAB, eos_token_id=2, bos_token_id=1, pad_token_id=0))
    save(oracle, folder)
    return oracle, LLM(str(folder), dtype="float32", max_model_len=32, skip_tokenizer_init=True)


def every_answer(oracle, length, eos, penalty):
    """(score, tokens) of all answers of at most `length` tokens that `eos` ends, or that have that many, best first."""
    found = []
    for answer in itertools.product(range(VOCAB), repeat=length):
        ends = answer.index(eos) if eos in answer else None
        tokens = answer if ends is None else answer[: ends + 1]
        if ends is not None and any(answer[ends + 1 :]):
            continue  # the same answer with other tokens behind its end
        rows = torch.log_softmax(logits(oracle, [*PROMPT, *tokens])[len(PROMPT) - 1 : -1].double(), -1)
        total = sum(float(row[token]) for row, token in zip(rows, tokens))
        kept = tokens if ends is None else tokens[:-1]
        found.append((total / (len(PROMPT) + len(kept)) ** penalty, [*PROMPT, *kept]))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_as_wide_as_the_vocabulary_it_finds_the_best_of_all(model, ignore_eos, penalty):
    oracle, llm = model
    params = BeamSearchParams(beam_width=VOCAB, max_tokens=2, ignore_eos=ignore_eos, length_penalty=penalty)
    (output,) = llm.beam_search([{"prompt_token_ids": PROMPT}], params)
    wanted = every_answer(oracle, 2, -1 if ignore_eos else 2, penalty)[:VOCAB]
    assert [sequence.tokens for sequence in output.sequences] == [tokens for _, tokens in wanted]
    got = [sequence.cum_logprob / len(sequence.tokens) ** penalty for sequence in output.sequences]
    assert got == pytest.approx([score for score, _ in wanted], abs=1e-4)
    assert all(sequence.finish_reason in ("stop", "length") for sequence in output.sequences)


def test_several_prompts_are_searched_each_alone(model):
    _, llm = model
    params = BeamSearchParams(beam_width=3, max_tokens=4)
    prompts = [[3, 5], [4], [6, 7, 8]]
    alone = [llm.beam_search([prompt], params)[0] for prompt in prompts]
    for at_once in (None, 2):
        together = llm.beam_search(prompts, params, concurrency_limit=at_once)
        for one, other in zip(alone, together, strict=True):
            assert [each.tokens for each in one.sequences] == [each.tokens for each in other.sequences]
            assert [each.cum_logprob for each in one.sequences] == pytest.approx([each.cum_logprob for each in other.sequences], abs=1e-5)
    with pytest.raises(ValueError, match="concurrency_limit=0"):
        llm.beam_search(prompts, params, concurrency_limit=0)
    for wrong in ({"beam_width": 0}, {"max_tokens": 0}):
        with pytest.raises(ValueError, match="is out of range"):
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, **wrong})
