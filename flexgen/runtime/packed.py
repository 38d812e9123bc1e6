"""A step with prompts as one run of numbers: tokens of several slots end to end, on the host and in one device tensor.

T tokens   R rows, one a piece
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from flexgen.runtime.abi import PAD_SLOT

LAST = -1
"""In place of a token id: the last token of the slot, which the host may not know yet."""


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one slot, from position `start`."""

    slot: int
    start: int
    ids: Sequence[int]


PADDING = Piece(PAD_SLOT, 0, (0,))


@dataclass(frozen=True)
class Shape:
    """How many tokens and rows a step has."""

    tokens: int
    rows: int

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> Shape:
        return cls(sum(len(piece.ids) for piece in pieces), len(pieces))

    def fill(self, pieces: Sequence[Piece], longest: int) -> list[Piece] | None:
        """`pieces` and padding rows that together have this shape, none of more than `longest` tokens; None if they cannot."""
        now = Shape.of(pieces)
        rows, tokens = self.rows - now.rows, self.tokens - now.tokens
        if rows < 1 or tokens < rows or tokens > rows * longest:
            return None
        counts = [tokens // rows + (row < tokens % rows) for row in range(rows)]
        return [*pieces, *(Piece(PAD_SLOT, 0, (0,) * count) for count in counts)]

    @property
    def numbers(self) -> int:
        """How many numbers describe a step of this shape."""
        return 3 * self.tokens + 4 * self.rows + 1


def numbers(pieces: Sequence[Piece], last: Sequence[int]) -> list[int]:
    """A step in the order of `Packed`. `last`: the token after which each drawing row draws, at most one a row."""
    counts = [len(piece.ids) for piece in pieces]
    return [
        *(token for piece in pieces for token in piece.ids),
        *(piece.start + offset for piece, count in zip(pieces, counts) for offset in range(count)),
        *(row for row, count in enumerate(counts) for _ in range(count)),
        *accumulate(counts, initial=0),
        *(piece.start + count for piece, count in zip(pieces, counts)),
        *(piece.slot for piece in pieces),
        *last,
        *[0] * (len(pieces) - len(last)),
    ]


@dataclass(frozen=True)
class Packed:
    """Views of one int64 tensor: ids (LAST: the slot's own), positions, rows; starts; lengths, slots, last tokens."""

    ids_T: Tensor
    positions_T: Tensor
    rows_T: Tensor
    starts_R: Tensor
    lengths_R: Tensor
    slots_R: Tensor
    last_R: Tensor

    @classmethod
    def of(cls, flat: Tensor, shape: Shape) -> Packed:
        t, r = shape.tokens, shape.rows
        return cls(*flat[: shape.numbers].split((t, t, t, r + 1, r, r, r)))
