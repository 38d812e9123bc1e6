"""What a layer keeps from step to step, as a package declares it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Pages:
    """A layer that keeps keys and values in pages. `window` None keeps all, else the last `window` tokens are enough."""

    kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True)
class SharedPages:
    """A layer that reads the pages of the last layer before it that has the attention entry `owner`; it keeps nothing."""

    owner: str


@dataclass(frozen=True)
class Slots:
    """A layer with recurrent state: named tensors, one row a request. A dtype of None is the model's."""

    tensors: dict[str, tuple[tuple[int, ...], torch.dtype | None]]


State = Pages | SharedPages | Slots | None
