"""Beam search over an engine: each step asks for one token of every beam, with the logprobs of the likeliest ones.

Beams share prefixes with each other and with their last step, which the prefix cache keeps. The score of an answer is its
logprob over the length of prompt and answer, without the end, to the power of `length_penalty`, as vLLM has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from flexgen.runtime.requests.outputs import RequestOutput, TokenLogprobs
from flexgen.runtime.requests.params import SamplingParams


@dataclass(frozen=True)
class BeamSearchParams:
    """How wide to search and how far. Raises ValueError with field, value and range."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: None = None

    def __post_init__(self) -> None:
        if self.structured_outputs is not None:
            raise NotImplementedError("structured_outputs is not supported in a beam search: no beam has a grammar's state")
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r} is out of range: it must be an int of at least 1")


@dataclass(frozen=True)
class BeamSearchSequence:
    """One answer: `tokens` are those of prompt and answer, the end included; `cum_logprob` that of the answer."""

    tokens: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None

    def score(self, eos: frozenset[int], penalty: float) -> float:
        length = len(self.tokens) - (self.tokens[-1] in eos)
        return self.cum_logprob / length**penalty


@dataclass(frozen=True)
class BeamSearchOutput:
    """The best answers to one prompt, best first."""

    sequences: list[BeamSearchSequence]

    def with_text(self, decode: Callable[[list[int]], str]) -> BeamSearchOutput:
        return BeamSearchOutput([replace(each, text=decode(each.tokens)) for each in self.sequences])


Generate = Callable[[list[list[int]], SamplingParams], list[RequestOutput]]
"""Answers to prompts of token ids, in their order."""


def search(
    prompts: Sequence[Sequence[int]], params: BeamSearchParams, generate: Generate, eos: frozenset[int], vocab: int
) -> list[BeamSearchOutput]:
    """The `beam_width` best answers to each prompt that were found, by a model of `vocab` tokens."""
    eos = frozenset() if params.ignore_eos else eos
    listed = min(2 * params.beam_width, vocab)
    one = SamplingParams(max_tokens=1, logprobs=listed, temperature=params.temperature, ignore_eos=True, detokenize=False)
    live = [[BeamSearchSequence(list(prompt))] for prompt in prompts]
    ended: list[list[BeamSearchSequence]] = [[] for _ in prompts]
    for _ in range(params.max_tokens):
        asked = [beam.tokens for beams in live for beam in beams]
        if not asked:
            break
        answers = iter(generate(asked, one))
        for place, beams in enumerate(live):
            grown = [longer for beam in beams for longer in _grown(beam, next(answers), eos, params)]
            ended[place] += [beam for beam in grown if beam.finish_reason]
            grown = [beam for beam in grown if not beam.finish_reason]
            live[place] = sorted(grown, key=lambda beam: beam.score(eos, params.length_penalty), reverse=True)[: params.beam_width]
    found = ([replace(beam, finish_reason="length") for beam in beams] for beams in live)
    return [BeamSearchOutput(_best([*done, *left], eos, params)) for done, left in zip(ended, found)]


def _grown(
    beam: BeamSearchSequence, answer: RequestOutput, eos: frozenset[int], params: BeamSearchParams
) -> Iterator[BeamSearchSequence]:
    """A beam with each of the likeliest tokens; one that ends a text ends it."""
    likeliest: TokenLogprobs = (answer.outputs[0].logprobs or [{}])[0]
    for token, found in likeliest.items():
        ends = token in eos
        kept = [token] if not ends or params.include_stop_str_in_output else []
        yield BeamSearchSequence(
            [*beam.tokens, *kept], [*beam.logprobs, likeliest], beam.cum_logprob + found.logprob,
            finish_reason="stop" if ends else None, stop_reason=token if ends else None,
        )  # fmt: skip


def _best(beams: list[BeamSearchSequence], eos: frozenset[int], params: BeamSearchParams) -> list[BeamSearchSequence]:
    return sorted(beams, key=lambda beam: beam.score(eos, params.length_penalty), reverse=True)[: params.beam_width]
