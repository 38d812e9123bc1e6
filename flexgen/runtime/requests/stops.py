"""Text of a growing answer, and the rules that end it. finish_reason and stop_reason follow vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

_INCOMPLETE = "\ufffd"
"""What a decoder puts where the bytes of a character are not all there yet, or make none."""

_MOST_OPEN = 3
"""Bytes, and so tokens, of a character that lacks its last one: UTF-8 has up to 4; a decoder writes a sign for each or for all."""

_CONTEXT_TOKENS = 6
"""Prompt tokens that an answer is decoded after, so that a leading space is kept."""

_KEPT_TOKENS = 16
"""Tokens that a piece without an end is decoded after, once there are twice as many: no piece costs more than these."""


class Detokenizer:
    """Turns token ids into text piece by piece; a character is released once all its bytes are there, or none can follow.

    Decoding starts a few tokens early each time, so that what a tokenizer drops at the start of a text (a leading space)
    is kept; the pieces together are the text of one decode of the whole answer. A character whose first bytes end the
    prompt belongs to the answer that completes it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int]) -> None:
        self._decode = decode
        self._ids = list(prompt[-_CONTEXT_TOKENS:])
        self._start, self._read = 0, len(self._ids)  # the window that is decoded, and its part that is released
        self._head: str | None = None  # the text of that part, None until it is wanted
        self._shown = 0  # characters of the window that are released

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete, maybe empty."""
        before = len(self._ids)
        self._ids.extend(ids)
        if len(ids) > 1 and _open(self._decode(self._ids[self._start :])):
            del self._ids[before:]  # a decoder may spoil a whole run of bytes for one that lacks its end
            return "".join(self.push([token]) for token in ids)
        return self._release(flush=False)

    def flush(self) -> str:
        """Whatever is held back, incomplete characters included."""
        return self._release(flush=True)

    def _release(self, flush: bool) -> str:
        if self._head is None:
            self._head = self._decode(self._ids[self._start : self._read])
            self._shown = len(self._head) - _open(self._head)
        whole = self._decode(self._ids[self._start :])
        sure = len(whole) if flush else self._sure(whole)
        piece = ""
        if sure > self._shown:
            if whole.startswith(self._head):  # else the answer completes what the prompt began
                self._shown = max(self._shown, len(self._head))
            piece = whole[self._shown : sure]
            self._shown = max(self._shown, sure)
        if piece and sure == len(whole):
            self._start, self._read, self._head = self._read, len(self._ids), None
        elif len(self._ids) - self._read > 2 * _KEPT_TOKENS:
            self._shorten(len(whole) - self._shown)
        return piece

    def _sure(self, whole: str) -> int:
        """How many characters of the window no further token can change."""
        signs, begun = _open(whole), len(self._ids) - self._read
        if signs and begun > _MOST_OPEN:
            return len(whole) - min(signs, _MOST_OPEN)
        return len(whole) - signs if not signs or whole.startswith(self._head or "") else self._shown

    def _shorten(self, held: int) -> None:
        """Forget all but the last tokens of a window that finds no end; `held` characters of it are not released."""
        self._start = self._read = len(self._ids) - _KEPT_TOKENS
        self._head, self._shown = "", max(0, len(self._decode(self._ids[self._start :])) - held)


def _open(text: str) -> int:
    """How many signs for incomplete characters end a text."""
    return len(text) - len(text.rstrip(_INCOMPLETE))


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
