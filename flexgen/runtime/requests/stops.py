"""Text of a growing answer, and the rules that end it. finish_reason and stop_reason follow vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

_INCOMPLETE = "\ufffd"
"""What a decoder puts where the bytes of a character are not all there yet."""

_CONTEXT_TOKENS = 6
"""Prompt tokens that an answer is decoded after, so that a leading space is kept."""


class Detokenizer:
    """Turns token ids into text piece by piece; a character is released once all its bytes are there.

    Decoding starts a few tokens early each time, so that what a tokenizer drops at the start of a text (a leading space)
    is kept; the pieces together are the text of one decode of the whole answer.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int]) -> None:
        self._decode = decode
        self._ids = list(prompt[-_CONTEXT_TOKENS:])
        self._start, self._read = 0, len(self._ids)
        self._head = ""
        self._head_ids = -1

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete, maybe empty."""
        self._ids.extend(ids)
        return self._release(flush=False)

    def flush(self) -> str:
        """Whatever is held back, incomplete characters included."""
        return self._release(flush=True)

    def _release(self, flush: bool) -> str:
        if self._head_ids != self._start:
            self._head, self._head_ids = self._decode(self._ids[self._start : self._read]), self._start
        whole = self._decode(self._ids[self._start :])
        if whole.endswith(_INCOMPLETE) and not flush:
            return ""
        piece = whole[len(self._head) :]
        if piece:
            self._start, self._read = self._read, len(self._ids)
        return piece


class StopRules(NamedTuple):
    """When one request ends.

    eos        the id whose end gives no stop_reason, or None
    stop_ids   all other ids that end it (further eos ids and stop_token_ids)
    strings    stop strings, the first in this order wins
    """

    eos: int | None
    stop_ids: frozenset[int]
    strings: tuple[str, ...]
    include_string: bool
    min_tokens: int
    max_tokens: int

    def by_token(self, token: int, produced: int) -> tuple[str, int | None] | None:
        """(finish_reason, stop_reason) if the request ends with `token`, its `produced`-th one, else None."""
        if produced >= self.min_tokens:
            if token == self.eos:
                return "stop", None
            if token in self.stop_ids:
                return "stop", token
        return ("length", None) if produced >= self.max_tokens else None

    def by_text(self, text: str, fresh: int) -> tuple[str, int] | None:
        """The stop string in `text`, and the length to cut `text` to, if its last `fresh` characters complete one."""
        for string in self.strings:
            at = text.find(string, max(0, len(text) - fresh - len(string) + 1))
            if at >= 0:
                return string, at + len(string) if self.include_string else at
        return None

    @property
    def held_back(self) -> int:
        """Characters at the end of an unfinished answer that may still turn out to begin a stop string."""
        if self.include_string:
            return 0
        return max((len(string) for string in self.strings), default=1) - 1
