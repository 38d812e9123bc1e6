"""What a generated package is given. Generated code reads nothing but `Layer`, its `Dims` and `Step`.

What it declares is in `weights` and `state`.

Shape suffixes, here and in generated code:
  T tokens of one step, packed request after request      R request rows of one step
  D model width    N query heads    K key/value heads      H head width    V vocabulary
  P pages of a pool    S tokens of a page    B blocks of a block table    E experts    I inner width of an MLP
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

ABI = 3
"""Raised by every change that makes older generated packages wrong; the loader refuses any other number."""

PAD_PAGE = 0
"""Page 0 of every pool takes the writes of padding rows. No allocator hands it out, no live row reads it."""

PAD_SLOT = 0
"""State slot 0, for the same purpose."""


class Layer:
    """Everything of one layer as attributes: weights by role (None: absent by configuration), K/V pages, state, rope.

    k_pages, v_pages  (P, S, K, H)       the pool of the layer's page group; page 0 is the pad page
    rope_cos, rope_sin (positions, rotated / 2) in the model's dtype, shared by all layers with that rope
    any name of `Slots.tensors`  (slots, ...)   slot 0 is the pad slot
    any name of the package's `routes`  (T, K) int16, where routers leave each token's experts; None: nobody asks
    Plain attributes on purpose: compiled code guards on their shapes and is shared by all layers of a kind.
    """

    def __init__(self, **tensors: Tensor | None) -> None:
        self.__dict__.update(tensors)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...


@dataclass
class PageStep:
    """One page group's part of a step.

    slots_T   (T,) int64: page * S + offset, where each token's key and value go
    table_RB  (R, B) int32: the pages of each request row in order; entries that hold nothing are PAD_PAGE
    split     (numbers,) int32: how decode's keys are split among a GPU's programs; None on a host, or where attention plans it
    """

    slots_T: Tensor
    table_RB: Tensor
    split: Tensor | None = None


@dataclass
class Step:
    """One call of the walker: T tokens of R requests, packed; row r owns tokens starts_R[r] to starts_R[r + 1].

    A row has at least one token, so T == R tells a decode step, of one token a row.

    positions_T  (T,) int64     position of each token in its request
    rows_T       (T,) int32     row of each token
    starts_R     (R + 1,) int32
    lengths_R    (R,) int32     tokens of each request once this step has written (its position + 1 for decode)
    pages        by attention entry; entries of one group share the same object
    state_R      (R,) int64     state slot of each row, or None where the model has no recurrent state
    """

    positions_T: Tensor
    rows_T: Tensor
    starts_R: Tensor
    lengths_R: Tensor
    pages: dict[str, PageStep]
    state_R: Tensor | None = None
