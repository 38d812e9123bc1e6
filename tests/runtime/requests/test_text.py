"""Text as it grows, and the rules that end an answer, through an engine that is made to say given tokens."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

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


def fallback_tokenizer():
    """Bytes as tokens 0 to 255 (`<0x00>`), letters after them, as SentencePiece models write what they have no piece for."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256} | {c: 257 + i for i, c in enumerate("abc")}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token=None))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    raw.decoder = decoders.Sequence(parts)
    return raw


def pieces(prompt, answer, decode=None):
    stepwise = Detokenizer(decode or fallback_tokenizer().decode, prompt)
    return [*(stepwise.push([token]) for token in answer), stepwise.flush()]


EMOJI, A, B = list("🙂".encode()), 257, 258


def test_an_answer_that_completes_the_prompts_character_owns_it():
    for known in range(4):
        assert "".join(pieces([A, *EMOJI[:known]], [*EMOJI[known:], A, B])) == "🙂ab"
    assert pieces([A, *EMOJI[:2]], [*EMOJI[2:], A, B]) == ["", "🙂", "a", "b", ""]
    byte_level = small_tokenizer()
    spread = byte_level.encode("🦊", add_special_tokens=False)
    assert len(spread) > 2
    assert "".join(pieces(spread[:2], [*spread[2:], *ids("ab")], byte_level.decode)) == "🦊ab"


def test_what_the_prompt_left_broken_is_not_the_answers():
    assert "".join(pieces([A, 0x80], [A, B])) == "ab"
    assert "".join(pieces([A, *EMOJI[:2]], [A, B])) == "ab"


def test_replacement_signs_are_released_once_no_character_can_follow_and_time_is_linear():
    def run(decode, token, count):
        started = time.process_time()
        parts = pieces([A], [token] * count, decode)
        return parts, time.process_time() - started

    for decode in (fallback_tokenizer().decode, small_tokenizer().decode):
        stray = 0x80 if decode([0x80]) == "\ufffd" else ids("🦊")[1]
        parts, _ = run(decode, stray, 300)
        assert "".join(parts) == "\ufffd" * 300
        assert all(len("".join(parts[: n + 1])) >= n - 2 for n in range(300))  # at most the last three are held
        short, long = run(decode, stray, 1000)[1], run(decode, stray, 8000)[1]
        assert long < 8 * short * 3
    spaces = [EXTRA] * 4000  # special tokens are no text
    codec = Tokens(small_tokenizer(), {}, {}, 340)
    started = time.process_time()
    assert "".join(pieces([50], [*spaces, *ids("fox")], codec.decode)) == "fox"
    assert time.process_time() - started < 5


def test_text_before_an_incomplete_character_is_not_held_back():
    assert pieces([A], [A, B, *EMOJI[:3]])[:2] == ["a", "b"]
    stepwise = Detokenizer(fallback_tokenizer().decode, [A])
    assert stepwise.push([A, B, *EMOJI[:2]]) == "ab" and stepwise.push(EMOJI[2:]) == "🙂"


def test_long_texts_of_bytes_alone_are_whole():
    text = "日本語🙂é" * 60
    assert "".join(pieces([A], list(text.encode()))) == text
    for size in (2, 3, 5, 7, 100):
        stepwise, data = Detokenizer(fallback_tokenizer().decode, [A]), list(text.encode())
        parts = [stepwise.push(data[at : at + size]) for at in range(0, len(data), size)]
        assert "".join(parts) + stepwise.flush() == text


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
