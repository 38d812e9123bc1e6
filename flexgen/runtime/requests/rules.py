"""Rules that need the host between two tokens: grammars, bad words of several tokens, callable logits processors.

A step that holds a request with such rules runs in lock-step: its tokens are read before the next step is launched.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexgen.runtime.requests.params import LogitsProcessor

if TYPE_CHECKING:
    from flexgen.runtime.requests.structured import Grammar

PhrasedWord = tuple[int, ...]


def bad_word_ids(words: Sequence[str], encode: Callable[[str], list[int]]) -> list[PhrasedWord]:
    """Token sequences that write `words`, as the tokenizer writes them at the start of a text and after a space."""
    sequences: list[PhrasedWord] = []
    for word in words:
        stem = word.lstrip() or word
        bare, spaced = tuple(encode(stem)), tuple(encode(" " + stem))
        if not bare:
            raise ValueError(f"bad_words holds {word!r}, which this tokenizer writes with no token at all")
        sequences.append(bare)
        if spaced[-len(bare) :] != bare:  # else whoever writes it writes the bare one
            sequences.append(spaced)
    return list(dict.fromkeys(sequences))


class HostRules:
    """The host-side rules of one request, in the order in which they act on its logits.

    `mask` comes before the device's own rules (bias, allowed ids, min_tokens), `process` after them, before penalties.
    ends   ids that end a text and that this request may draw
    fault  why no token can be drawn for it any more, None while one can
    """

    def __init__(
        self,
        grammar: Grammar | None,
        bad_phrases: Sequence[PhrasedWord],
        processors: Sequence[LogitsProcessor],
        ends: Sequence[int] = (),
    ) -> None:
        self._grammar, self._bad_phrases = grammar, list(bad_phrases)
        self._processors = [(processor, _parameters(processor)) for processor in processors]
        self._ends = torch.tensor(list(ends), dtype=torch.int64)
        self._last_V: Tensor | None = None
        self.fault: str | None = None

    def mask(self, logits_V: Tensor, outputs: Sequence[int]) -> Tensor:
        """`logits_V` (fp32) with what grammar and bad phrases rule out at -inf."""
        self._last_V = None
        if self._grammar is not None:
            logits_V = self._grammar.mask(logits_V)
            if self._must_end(logits_V):
                self._last_V = logits_V
        banned = [p[-1] for p in self._bad_phrases if len(outputs) >= len(p) - 1 and _ends_with(outputs, p[:-1])]
        if banned:
            logits_V = logits_V.index_fill(0, torch.tensor(banned, device=logits_V.device), float("-inf"))
        return logits_V

    def process(self, logits_V: Tensor, prompt: Sequence[int], outputs: Sequence[int]) -> Tensor:
        """What the caller's logits processors make of `logits_V`.

        One that fails fails its own request, and no other of the step: `fault` says how, and the logits come back NaN.
        """
        if self._last_V is not None:
            logits_V = torch.where(logits_V == float("-inf"), self._last_V, logits_V)
        for processor, parameters in self._processors:
            arguments = (list(prompt), list(outputs)) if parameters == 3 else (list(outputs),)
            try:
                result = processor(*arguments, logits_V)
                self.fault = _unusable(result, logits_V)
            except Exception as error:  # whatever a caller's function raises
                result, self.fault = None, f"{type(error).__name__}: {error}"
            if self.fault is not None:
                self.fault = f"has no probability: logits processor {processor!r} {self.fault}"
                return torch.full_like(logits_V, float("nan"))
            assert result is not None
            logits_V = result.float()
        return logits_V

    def accept(self, token: int) -> str | None:
        """Tell the grammar which token was taken. -> what is wrong where it takes none such, else None."""
        if self._grammar is None or self._grammar.accept(token):
            return None
        return f"is {token}, which the grammar does not allow here: a logits processor brought it back"

    def _must_end(self, logits_V: Tensor) -> bool:
        """Whether the grammar leaves nothing but the ends of a text, which min_tokens then cannot hold off."""
        open_V = logits_V.isfinite()
        return bool(open_V.any()) and int(open_V.sum()) == int(open_V[self._ends.to(open_V.device)].sum())

    @property
    def complete(self) -> bool:
        """Whether the grammar has accepted its end, so that nothing may follow."""
        return self._grammar is not None and self._grammar.complete


def _unusable(result: object, logits_V: Tensor) -> str | None:
    """Why a processor's result cannot be drawn from, None where it can."""
    if not isinstance(result, Tensor) or result.shape != logits_V.shape:
        found = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        return f"returned {found}, and must return a tensor of shape {tuple(logits_V.shape)}"
    return "returned NaN" if bool(result.isnan().any()) else None


def _ends_with(outputs: Sequence[int], ending: PhrasedWord) -> bool:
    return not ending or tuple(outputs[-len(ending) :]) == ending


def _parameters(processor: LogitsProcessor) -> int:
    """2 or 3: how many positional arguments a logits processor takes."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = [p for p in inspect.signature(processor).parameters.values() if p.kind in positional and p.default is p.empty]
    if len(taken) not in (2, 3):
        raise ValueError(
            f"logits processor {processor!r} takes {len(taken)} arguments; it must take (output_ids, logits) or "
            "(prompt_ids, output_ids, logits)"
        )
    return len(taken)
