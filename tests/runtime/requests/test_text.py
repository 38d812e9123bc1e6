"""Text as it grows, and the rules that end an answer, through an engine that is made to say given tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen.runtime.engine import Engine
from flexgen.runtime.options import EngineOptions
from flexgen.runtime.requests.params import RequestOutputKind, SamplingParams
from flexgen.runtime.requests.stops import Detokenizer, StopRules
from flexgen.runtime.requests.tokens import Tokens
from tests.runtime.small_tokenizer import small_tokenizer
from tests.runtime.toy import Toy

torch.set_num_threads(1)
EOS, EXTRA = 1, 2


def parrot(script, vocab=340, config=None):
    """An engine whose model says `script`, then token 50 for ever, whatever the prompt of one token."""
    toy = Toy(vocab=vocab, config=config)
    forward = toy.forward
    script = torch.tensor([*script, *[50] * 200])

    def speak(ids_T, step):
        forward(ids_T, step)
        return torch.nn.functional.one_hot(script[step.positions_T], vocab).float() * 50

    toy.forward, toy.logits = speak, lambda hidden_RD: hidden_RD
    tokens = Tokens(small_tokenizer(), toy.config, {}, vocab)
    return Engine(toy, tokens, EngineOptions(100, max_num_seqs=2, num_gpu_blocks_override=20))


def say(script, config=None, **params):
    """The answer of a parrot, and the texts of all outputs on the way to it."""
    engine = parrot(script, config=config)
    group = engine.add("0", [5], SamplingParams(**{"temperature": 0, "max_tokens": 30, "logprobs": 0, **params}))
    texts = []
    while engine.unfinished:
        engine.step()
        texts.append(group.output().outputs[0].text)
    answer = group.output().outputs[0]
    assert len(answer.token_ids) == len(answer.logprobs)
    assert [next(iter(entry)) for entry in answer.logprobs] == answer.token_ids
    return answer, texts


def ids(text):
    return small_tokenizer().encode(text, add_special_tokens=False)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(tokens=st.lists(st.integers(0, 329), max_size=25), cuts=st.lists(st.integers(1, 4), min_size=1), skip=st.booleans())
def test_pieces_add_up_to_the_whole_text(tokens, cuts, skip):
    tokenizer = small_tokenizer()
    codec = Tokens(tokenizer, {}, {}, 340)
    stepwise = Detokenizer(lambda part: codec.decode(part, skip), ids("the fox"))
    text, at, turn = "", 0, 0
    while at < len(tokens):
        size = cuts[turn % len(cuts)]
        text, at, turn = text + stepwise.push(tokens[at : at + size]), at + size, turn + 1
        assert not text.endswith("\ufffd") or "\ufffd" in tokenizer.decode(tokens)
    assert text + stepwise.flush() == tokenizer.decode(tokens, skip_special_tokens=skip)


def test_characters_of_several_tokens_appear_whole():
    answer, texts = say([*ids("a🙂日b"), EOS])
    assert answer.text == "a🙂日b" and answer.finish_reason == "stop"
    assert not any("\ufffd" in text for text in texts)
    assert all(answer.text.startswith(text) for text in texts)


def test_a_stop_string_across_tokens_ends_the_text_before_it():
    script = ids("the quick brown fox")
    answer, texts = say(script, stop=["k bro", "zzz"])
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("the quic", "stop", "k bro")
    assert answer.token_ids == script[: len(answer.token_ids)]
    assert all("the quic".startswith(text) for text in texts)  # nothing of the stop string was ever shown


def test_include_stop_str_in_output_keeps_it():
    answer, _ = say(ids("the quick brown fox"), stop="k bro", include_stop_str_in_output=True)
    assert (answer.text, answer.stop_reason) == ("the quick bro", "k bro")


def test_stop_strings_do_not_count_before_min_tokens():
    script = ids("aXbXc")
    assert len(script) == 5
    assert say(script, stop="X")[0].text == "a"
    assert say(script, stop="X", min_tokens=2)[0].text == "aXb"


def test_eos_ends_and_is_kept_among_the_tokens():
    answer, _ = say([*ids("fox"), EOS, *ids("dog")])
    assert answer.token_ids == [*ids("fox"), EOS]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("fox", "stop", None)


def test_ignore_eos_goes_on_to_max_tokens():
    answer, _ = say([*ids("fox"), EOS, *ids("dog")], ignore_eos=True, max_tokens=len(ids("fox")) + 2)
    assert answer.finish_reason == "length" and answer.token_ids[: len(ids("fox")) + 1] == [*ids("fox"), EOS]


def test_min_tokens_bars_eos():
    answer, _ = say([EOS, EOS, EOS, EOS, EOS], min_tokens=3, max_tokens=6)
    assert EOS not in answer.token_ids[:3] and answer.token_ids[3] == EOS and len(answer.token_ids) == 4


@pytest.mark.parametrize("eos", [77, [77, 78], [1, 77]])
def test_eos_is_the_union_of_config_and_tokenizer(eos):
    answer, _ = say([60, 77, 60], config={"eos_token_id": eos})
    assert answer.token_ids == [60, 77]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", 77)  # not the primary eos, so it is named
    answer, _ = say([60, EOS, 60], config={"eos_token_id": eos})
    assert (answer.token_ids, answer.stop_reason) == ([60, EOS], None)


def test_stop_token_ids_are_no_text_unless_asked_for():
    script = ids("the fox")
    answer, _ = say(script, stop_token_ids=[script[-1]])
    assert (answer.finish_reason, answer.stop_reason) == ("stop", script[-1])
    assert answer.token_ids == script and answer.text == small_tokenizer().decode(script[:-1])
    answer, _ = say(script, stop_token_ids=[script[-1]], include_stop_str_in_output=True)
    assert answer.text == "the fox"


def test_special_tokens_are_skipped_or_shown_and_spaced():
    script = [*ids("a"), EXTRA, EXTRA, *ids("b"), EOS]
    assert say(script)[0].text == "ab"
    assert say(script, skip_special_tokens=False)[0].text == "a<extra><extra>b"
    assert say(script, skip_special_tokens=False, spaces_between_special_tokens=False)[0].text == "a<extra><extra>b"


def test_without_detokenize_there_is_no_text():
    assert say(ids("fox"), detokenize=False, max_tokens=2)[0].text == ""


def test_delta_outputs_add_up():
    engine = parrot([*ids("the quick brown 🙂 fox"), EOS])
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=0, output_kind=RequestOutputKind.DELTA, stop="zz")
    group = engine.add("0", [5], params)
    text, tokens, logprobs = "", [], []
    while engine.unfinished:
        engine.step()
        answer = group.output().outputs[0]
        text, tokens, logprobs = text + answer.text, tokens + answer.token_ids, logprobs + answer.logprobs
    assert text == "the quick brown 🙂 fox" and tokens == [*ids(text), EOS] and len(logprobs) == len(tokens)


def test_padding_ids_of_the_vocabulary_are_never_sampled():
    answer, _ = say([335, 336, 60], max_tokens=3, logprobs=-1)
    assert all(token < len(small_tokenizer()) for token in answer.token_ids)
    assert answer.logprobs[0][335].logprob == float("-inf")


def test_the_first_listed_stop_string_wins():
    rules = StopRules(None, frozenset(), ("cd", "bc"), False, 0, 9)
    assert rules.by_text("abcd", fresh=4) == ("cd", 2)
    assert rules.by_text("abcd", fresh=1) == ("cd", 2)
    assert rules.by_text("abcdxx", fresh=1) is None
    assert rules.held_back == 1
