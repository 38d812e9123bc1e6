"""What a caller asks of one request. The names, defaults and ranges are vLLM's; docs/parameters.md describes each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from numbers import Integral, Real
from typing import Any

from torch import Tensor

from flexgen.contract.json_files import shown
from flexgen.runtime.surface import NEUTRAL_FIELDS, check_neutral

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy."""

LogitsProcessor = Callable[..., Tensor]
"""`f(output_ids, logits_V)` or `f(prompt_ids, output_ids, logits_V)`, returning fp32 logits of the same shape."""


class RequestOutputKind(Enum):
    """What each output of a streamed request holds."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The language that an answer must belong to: exactly one of the first five fields.

    json                    a JSON schema, as a dict, as text or as a pydantic model
    regex                   a regular expression that the whole answer matches
    choice                  the answer is one of these strings
    grammar                 a grammar in xgrammar's EBNF, its root rule named `root`
    json_object             any JSON object
    disable_any_whitespace  compact JSON (with json only)
    """

    json: str | Mapping[str, Any] | type | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        kinds = ("json", "regex", "choice", "grammar", "json_object")
        given = [name for name in kinds if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = ", ".join(given) or "none"
            raise ValueError(f"structured_outputs takes exactly one of {', '.join(kinds)}; got {found}")
        self._check_types()
        if self.choice is not None and (isinstance(self.choice, str) or not all(_is_text(c) for c in self.choice)):
            raise ValueError(f"structured_outputs.choice must be a list of non-empty strings, got {shown(self.choice)}")
        if self.disable_any_whitespace and self.json is None:
            raise ValueError("structured_outputs.disable_any_whitespace has an effect on json only")

    def _check_types(self) -> None:
        model = isinstance(self.json, type) and callable(getattr(self.json, "model_json_schema", None))
        if not isinstance(self.json, str | Mapping | None) and not model:
            raise ValueError(f"structured_outputs.json must be a JSON schema or a pydantic model, got {shown(self.json)}")
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise ValueError(f"structured_outputs.{name} must be text, got {shown(getattr(self, name))}")
        if not isinstance(self.choice, Sequence | None):
            raise ValueError(f"structured_outputs.choice must be a list of non-empty strings, got {shown(self.choice)}")
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool | None):
                raise ValueError(f"structured_outputs.{name} must be True or False, got {shown(getattr(self, name))}")


@dataclass(frozen=True)
class LoRARequest:
    """An adapter to run a request with: a name, a number of its own, and the PEFT directory or its tensors."""

    lora_name: str
    lora_int_id: int
    lora_path: str | None = None
    lora_tensors: Mapping[str, Tensor] | None = None


_LARGEST, _MOST = 3.4e38, 2**31 - 1
"""What fp32 holds, and the highest count."""


@dataclass
class SamplingParams:
    """How to draw the tokens of a request and when to stop. Every field acts, or raises ValueError with its range."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    logits_processors: Sequence[LogitsProcessor] | None = None
    skip_reading_prefix_cache: bool | None = None
    return_routed_experts: bool | None = None
    logprob_token_ids: Sequence[int] | None = None
    flat_logprobs: bool = False
    skip_clone: bool = False
    output_text_buffer_length: int = 0
    extra_args: Mapping[str, Any] | None = None
    routed_experts_prompt_start: int = 0
    thinking_token_budget: int | None = None
    repetition_detection: Any = None

    @classmethod
    def from_optional(cls, **fields: Any) -> SamplingParams:
        """Parameters of which some are None, which stands for the default; ids of `logit_bias` may be text."""
        if fields.get("logit_bias") is not None:
            fields["logit_bias"] = {int(token): min(100.0, max(-100.0, bias)) for token, bias in fields["logit_bias"].items()}
        optional = {"max_tokens"}
        return cls(**{name: value for name, value in fields.items() if value is not None or name in optional})

    def __post_init__(self) -> None:
        self.validate()

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whichever form it was given in."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def penalises(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    def clone(self) -> SamplingParams:
        """A copy whose fields can be set without touching this one (callables and schemas are shared)."""
        return copy.copy(self)

    def validate(self) -> None:
        """Check every field, also after fields were assigned, and make lists of token ids lists.

        Raises ValueError naming field, value and range.
        """
        _integer("n", self.n, 1, 16384)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        _number("repetition_penalty", self.repetition_penalty, 0, _LARGEST, open_low=True)
        _number("temperature", self.temperature, 0, _LARGEST)
        _number("top_p", self.top_p, 0, 1, open_low=True)
        _integer("top_k", self.top_k, -1, _MOST, hint="0 or -1 for no limit")
        _number("min_p", self.min_p, 0, 1)
        self._validate_counts()
        self._validate_stops()
        self._validate_tokens()
        if self.greedy and self.n > 1:
            raise ValueError(f"n={self.n} with temperature={self.temperature}: greedy answers are all the same; use n=1")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {shown(getattr(self, name))}")
        _instance("output_kind", self.output_kind, RequestOutputKind)
        for name, neutral in NEUTRAL_FIELDS.items():
            check_neutral(name, getattr(self, name), neutral)
        for name in ("return_routed_experts", "skip_reading_prefix_cache"):
            if not isinstance(getattr(self, name), bool | None):
                raise ValueError(f"{name} must be True, False or None, got {shown(getattr(self, name))}")
        if self.structured_outputs is not None:
            _instance("structured_outputs", self.structured_outputs, StructuredOutputsParams)

    def _validate_counts(self) -> None:
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, None, hint="None for as many as max_model_len allows")
        _integer("min_tokens", self.min_tokens, 0, _MOST)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), -1, None, hint="-1 for the whole vocabulary")

    def _validate_stops(self) -> None:
        listed = self.stop is None or isinstance(self.stop, str | Sequence)
        strings = self.stop_strings if listed else ()
        if not listed or not all(_is_text(text) for text in strings):
            raise ValueError(f"stop must be a non-empty string or a list of them, got {shown(self.stop)}")
        if strings and not self.detokenize:
            raise ValueError(f"stop={list(strings)} needs the text, and detokenize=False makes none")
        self.stop_token_ids = _token_list("stop_token_ids", self.stop_token_ids)

    def _validate_tokens(self) -> None:
        self.allowed_token_ids = _token_list("allowed_token_ids", self.allowed_token_ids)
        if self.allowed_token_ids == []:
            raise ValueError("allowed_token_ids=[] allows no token at all; leave it None to allow all")
        if self.logit_bias is not None:
            _instance("logit_bias", self.logit_bias, Mapping)
            _token_list("logit_bias", list(self.logit_bias))
            for token, bias in self.logit_bias.items():
                _number(f"logit_bias[{token}]", bias, -_LARGEST, _LARGEST)
            self.logit_bias = {int(token): float(bias) for token, bias in self.logit_bias.items()}
        for name in ("bad_words", "logits_processors"):
            if isinstance(getattr(self, name), str) or not isinstance(getattr(self, name), Sequence | None):
                raise ValueError(f"{name} must be a list, got {shown(getattr(self, name))}")
        if not all(_is_text(word) for word in self.bad_words or ()):
            raise ValueError(f"bad_words must be non-empty strings, got {shown(self.bad_words)}")
        if not all(callable(processor) for processor in self.logits_processors or ()):
            raise ValueError(f"logits_processors must be callables, got {shown(self.logits_processors)}")


_FLAGS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _instance(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be a {kind.__name__}, got {shown(value)}")


def _integer(name: str, value: object, low: int, high: int | None, hint: str = "") -> None:
    limit = f"at least {low}" if high is None else f"from {low} to {high}"
    limit += f" ({hint})" if hint else ""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be an int {limit}, got {shown(value)}")
    number: Any = value
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name}={value} is out of range: it must be {limit}")


def _number(name: str, value: object, low: float, high: float, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number, got {shown(value)}")
    number: Any = value  # not as a float, which has no place for a huge int
    if not low <= number <= high or (open_low and number == low):
        raise ValueError(f"{name}={value} is out of range: it must be in {'(' if open_low else '['}{low:g}, {high:g}]")


def _token_list(name: str, values: Any) -> list[int] | None:
    """Token ids in any form (a list, a set, a generator, an array) as a list."""
    if values is None:
        return None
    values = values.tolist() if callable(getattr(values, "tolist", None)) else values
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a list of token ids, got {shown(values)}")
    ids = list(values)
    for value in ids:
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
            raise ValueError(f"{name} must be token ids (ints from 0), got {shown(value)}")
    return [int(value) for value in ids]
