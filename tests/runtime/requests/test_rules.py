"""Host-side rules: grammars, bad words and callables, and that they change nothing for the other requests."""

import json
import re

import pytest
import torch

from flexgen.runtime.engine import Engine
from flexgen.runtime.options import EngineOptions
from flexgen.runtime.requests.params import SamplingParams, StructuredOutputsParams
from flexgen.runtime.requests.rules import bad_word_ids
from flexgen.runtime.requests.tokens import Tokens
from tests.runtime.small_tokenizer import small_tokenizer
from tests.runtime.toy import Toy

torch.set_num_threads(1)


def finish(params, **options):
    """The groups of `params`, all run together."""
    toy = Toy(vocab=340)
    engine = Engine(toy, Tokens(small_tokenizer(), {}, {}, 340), EngineOptions(200, 4, num_gpu_blocks_override=60, **options))
    groups = [engine.add(str(i), [5 + i], each) for i, each in enumerate(params)]
    while engine.unfinished:
        engine.step()
    return engine, [group.output().outputs[0] for group in groups]


def structured(**language):
    pytest.importorskip("xgrammar")
    return SamplingParams(seed=2, max_tokens=150, structured_outputs=StructuredOutputsParams(**language))


def test_answers_belong_to_their_language():
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 0}}, "required": ["n"]}
    schema["additionalProperties"] = False
    languages = [
        structured(regex=r"[ab]{3}-\d"),
        structured(choice=["the fox", "a \"dog\""]),
        structured(grammar='root ::= "x" root | "y"'),
        structured(json=schema, disable_any_whitespace=True),
    ]
    engine, (regex, choice, grammar, document) = finish(languages)
    assert re.fullmatch(r"[ab]{3}-\d", regex.text) and regex.finish_reason == "stop"
    assert choice.text in ("the fox", "a \"dog\"")
    assert re.fullmatch("x*y?", grammar.text)
    assert 0 <= json.loads(document.text)["n"] <= 99
    metrics = engine.all_metrics()
    assert metrics["lock_step_steps"] == metrics["prefill_steps"] + metrics["decode_steps"]
    assert metrics["dropped_tokens"] == 0


@pytest.mark.parametrize("language", [{"choice": ["fox"]}, {"regex": "a{2}"}, {"grammar": 'root ::= "y"'}])
def test_the_end_of_a_grammar_outranks_min_tokens(language):
    params = structured(**language)
    params.min_tokens = 40
    _, (answer, other) = finish([params, SamplingParams(seed=1, max_tokens=8, ignore_eos=True)])
    assert (answer.text, answer.finish_reason, answer.stop_reason) == (
        {"choice": "fox", "regex": "aa", "grammar": "y"}[next(iter(language))], "stop", None
    )  # fmt: skip
    assert len(other.token_ids) == 8


def test_a_grammar_that_may_go_on_does_until_min_tokens():
    params = structured(regex="a+")
    params.min_tokens = 20
    _, (answer,) = finish([params])
    assert len(answer.token_ids) > 20 and set(answer.text) == {"a"}


def test_a_token_that_a_processor_brings_back_against_the_grammar_is_that_requests_error():
    params = structured(choice=["fox"])
    params.logits_processors = [lambda outputs, row: torch.zeros_like(row).index_fill(0, torch.tensor([9]), 50.0)]
    _, (answer, other) = finish([params, SamplingParams(seed=1, max_tokens=8, ignore_eos=True)])
    assert answer.finish_reason == "error" and "the grammar does not allow" in answer.error and len(other.token_ids) == 8


def test_a_schema_or_grammar_that_is_not_well_formed_is_refused():
    for language, kind in [({"regex": "(a"}, "regex"), ({"grammar": "root := x"}, "grammar"), ({"json": "{"}, "json")]:
        with pytest.raises(ValueError, match=f"structured_outputs.{kind} is not valid"):
            finish([structured(**language)])


def test_the_other_requests_do_not_change():
    plain = [SamplingParams(seed=8, max_tokens=20, logprobs=0, ignore_eos=True) for _ in range(2)]
    _, alone = finish([SamplingParams(max_tokens=1), *plain])
    _, beside = finish([SamplingParams(max_tokens=20, logits_processors=[lambda outputs, row: row]), *plain])
    for mine, theirs in zip(beside[1:], alone[1:]):
        assert mine.token_ids == theirs.token_ids
        values = [[entry.logprob for step in answer.logprobs for entry in step.values()] for answer in (mine, theirs)]
        assert values[0] == pytest.approx(values[1], abs=1e-5)


def test_a_processor_sees_prompt_outputs_and_biased_logits():
    calls = []

    def only(prompt, outputs, row):
        calls.append((list(prompt), list(outputs), float(row[9])))
        return torch.full_like(row, float("-inf")).index_fill(0, torch.tensor([60 + len(outputs)]), 0.0)

    params = SamplingParams(max_tokens=3, logits_processors=[only], logit_bias={9: 1000.0}, ignore_eos=True, logprobs=0)
    _, (answer,) = finish([params])
    assert answer.token_ids == [60, 61, 62]
    assert [call[:2] for call in calls] == [([5], []), ([5], [60]), ([5], [60, 61])]
    assert all(call[2] > 900 for call in calls)
    assert all(entry.logprob == 0 for step in answer.logprobs for entry in step.values())


def test_processors_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="takes 1 arguments"):
        finish([SamplingParams(logits_processors=[lambda row: row])])
    _, (answer,) = finish([SamplingParams(logits_processors=[lambda outputs, row: row[:3]])])
    assert answer.finish_reason == "error" and "must return a tensor of shape (340,)" in answer.error


def test_bad_words_of_one_and_of_several_tokens_never_appear():
    def encode(text):
        return small_tokenizer().encode(text, add_special_tokens=False)

    free = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    _, (before,) = finish([free])
    # words made of what it would say: its first token, and a pair of later ones
    single = small_tokenizer().decode(before.token_ids[:1])
    assert encode(single) == before.token_ids[:1]
    engine, (after,) = finish([SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, bad_words=[single])])
    assert before.token_ids[0] not in after.token_ids and engine.metrics.lock_step_steps == 0
    pair = next(
        word
        for first, second in zip(before.token_ids, before.token_ids[1:])
        if encode(word := small_tokenizer().decode([first, second])) == [first, second]
    )
    engine, (after,) = finish([SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, bad_words=[pair])])
    banned = tuple(encode(pair))
    assert banned in zip(before.token_ids, before.token_ids[1:])
    assert banned not in zip(after.token_ids, after.token_ids[1:])
    assert engine.metrics.lock_step_steps > 0


def test_bad_words_are_barred_with_and_without_a_space_before():
    vocabulary = {"dog": [3], " dog": [4], "lazy dog": [5, 4], " lazy dog": [6, 4], "x": [7], " x": [8, 7]}
    assert bad_word_ids(["dog", " lazy dog", "x"], vocabulary.__getitem__) == [(3,), (4,), (5, 4), (6, 4), (7,)]


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs"])
def test_rules_that_allow_nothing_are_an_error_of_that_request(mode):
    nothing = SamplingParams(allowed_token_ids=[9], bad_words=[small_tokenizer().decode([9])])
    _engine, answers = finish([nothing, SamplingParams(max_tokens=4)], logprobs_mode=mode)
    assert answers[0].finish_reason == "error" and answers[1].finish_reason in ("stop", "length")
