"""A step with prompts as one run of numbers: tokens of several slots end to end, on the host and in one device tensor.

The runner makes pieces of a plan's rows; `step` and `graphs` read them as `Packed`.

T tokens   R rows, one a piece
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from torch import Tensor

from flexgen.contract.abi import PAD_SLOT

LAST = -1
"""In place of a token id: the last token of the slot, which the host may not know yet."""


@dataclass(slots=True)
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
        count, longer = divmod(tokens, rows)
        short, long = (Piece(PAD_SLOT, 0, (0,) * size) for size in (count, count + 1))
        return [*pieces, *[long] * longer, *[short] * (rows - longer)]

    @property
    def numbers(self) -> int:
        """How many numbers describe a step of this shape."""
        return 3 * self.tokens + 4 * self.rows + 1


def numbers(pieces: Sequence[Piece], last: Sequence[int]) -> np.ndarray:
    """A step in the order of `Packed`, int64. `last`: the token after which each drawing row draws, at most one a row."""
    slots_R = [piece.slot for piece in pieces]
    counts_R = np.array([len(piece.ids) for piece in pieces])
    lengths_R = np.array([piece.start for piece in pieces]) + counts_R
    stops_R = counts_R.cumsum()
    ids_T = np.fromiter(chain.from_iterable(piece.ids for piece in pieces), np.int64, stops_R[-1])
    rows_T = np.arange(len(pieces)).repeat(counts_R)
    positions_T = np.arange(len(rows_T)) + (lengths_R - stops_R)[rows_T]
    last_R = [*last, *[0] * (len(pieces) - len(last))]
    return np.concatenate((ids_T, positions_T, rows_T, [0], stops_R, lengths_R, slots_R, last_R))


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
