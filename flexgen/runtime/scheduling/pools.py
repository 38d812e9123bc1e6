"""Tensors that requests keep between steps: K/V pools by page group, recurrent state by slot. The engine makes one `Cache`.

Layers of one (kv_heads, head_dim, window) form a page group. Each of its layers has its own pools, k and v, of shape
(pages + 1, block_size, kv_heads, head_dim); the group shares one block table. `SharedPages` entries use their owner's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from flexgen.contract.abi import Layer
from flexgen.contract.state import Pages, SharedPages, Slots, State
from flexgen.runtime.served import ServedModel


@dataclass(frozen=True)
class PageGroup:
    """Layers that share a geometry, and the attention entries (owners and sharers) that use the group's block table."""

    geometry: Pages
    layers: tuple[int, ...]
    entries: tuple[str, ...]

    def page_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one page over all layers, k and v."""
        return 2 * len(self.layers) * block_size * self.geometry.kv_heads * self.geometry.head_dim * dtype.itemsize


def page_groups(mixers: Sequence[Sequence[str]], state: Mapping[str, State]) -> list[PageGroup]:
    """The page groups of a model, those that keep every token first."""
    layers: dict[Pages, list[int]] = {}
    entries: dict[Pages, list[str]] = {}
    for name, kept in state.items():
        owner = state[kept.owner] if isinstance(kept, SharedPages) else kept
        if isinstance(owner, Pages):
            entries.setdefault(owner, []).append(name)
    for index, names in enumerate(mixers):
        for name in names:
            if isinstance(own := state[name], Pages):
                layers.setdefault(own, []).append(index)
    groups = [PageGroup(pages, tuple(owned), tuple(entries[pages])) for pages, owned in layers.items()]
    return sorted(groups, key=lambda group: group.geometry.window is not None)


def group_pages(
    groups: Sequence[PageGroup], full_pages: int, block_size: int, max_num_seqs: int, max_num_batched_tokens: int
) -> list[int]:
    """Pages of every group's pool, given those of a group that keeps every token.

    A window group never needs more than a full one. Nor does it need more than what all slots can see at once: the blocks
    of window - 1 tokens, two that are partly filled at each end, and the tokens that one step adds.
    """
    step_blocks = -(-max_num_batched_tokens // block_size)
    pages = []
    for group in groups:
        window = group.geometry.window
        if window is None:
            pages.append(full_pages)
        else:
            visible = -(-(window - 1) // block_size) + 2
            pages.append(min(full_pages, max_num_seqs * visible + step_blocks))
    return pages


class Cache:
    """The pools and state tensors of one engine, bound to the model's layers.

    tensors are allocated once and stay where they are for the engine's life.
    states holds, by entry, the state tensors of each layer with it.
    recorded (routers, tokens, K) int16 takes the experts of the first tokens of each step, for `routed_tokens` of them; -1
    where a router chooses fewer than K. None where `routed_tokens` is 0 or there are no routers.
    """

    def __init__(
        self,
        model: ServedModel,
        groups: Sequence[PageGroup],
        pages: Sequence[int],
        block_size: int,
        slots: int,
        routed_tokens: int = 0,
    ) -> None:
        self.groups, self.pages, self.block_size, self.slots = list(groups), list(pages), block_size, slots
        self.dtype, self.device = model.dtype, model.device
        self.states: dict[str, list[list[Tensor]]] = {}
        with torch.no_grad():
            for group, count in zip(self.groups, self.pages):
                self._bind_pages(model, group, count)
            self._bind_shared(model)
            self._bind_slots(model)
            self._bind_recorded(model, routed_tokens)

    def _bind_pages(self, model: ServedModel, group: PageGroup, pages: int) -> None:
        shape = (pages + 1, self.block_size, group.geometry.kv_heads, group.geometry.head_dim)
        for index in group.layers:
            model.layers[index].k_pages = torch.zeros(shape, dtype=self.dtype, device=self.device)
            model.layers[index].v_pages = torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _bind_shared(self, model: ServedModel) -> None:
        last: dict[str, Layer] = {}
        for layer, names in zip(model.layers, model.mixers):
            for name in names:
                kept = model.state[name]
                if isinstance(kept, Pages):
                    last[name] = layer
                elif isinstance(kept, SharedPages):
                    layer.k_pages, layer.v_pages = last[kept.owner].k_pages, last[kept.owner].v_pages

    def _bind_slots(self, model: ServedModel) -> None:
        for layer, names in zip(model.layers, model.mixers):
            for name in names:
                if not isinstance(kept := model.state[name], Slots):
                    continue
                made = {
                    tensor: torch.zeros((self.slots + 1, *shape), dtype=dtype or self.dtype, device=self.device)
                    for tensor, (shape, dtype) in kept.tensors.items()
                }
                layer.__dict__.update(made)
                self.states.setdefault(name, []).append(list(made.values()))

    def _bind_recorded(self, model: ServedModel, tokens: int) -> None:
        routers = [(layer, name, k) for layer, names in zip(model.layers, model.routers) for name, k in names.items()]
        self.recorded = None
        if tokens and routers:
            shape = (len(routers), -(-tokens // 8) * 8, max(k for _, _, k in routers))  # rows of whole 16 bytes
            self.recorded = torch.full(shape, -1, dtype=torch.int16, device=self.device)
        for index, (layer, name, k) in enumerate(routers):
            setattr(layer, name, None if self.recorded is None else self.recorded[index, :, :k])

    @property
    def recorded_shape(self) -> tuple[int, int] | None:
        """(routers, experts of each) that are recorded of a token, or None where none are."""
        return None if self.recorded is None else (self.recorded.shape[0], self.recorded.shape[2])

    def slot_bytes(self, entry: str) -> int:
        """Bytes of recurrent state that one slot takes over all layers with `entry`."""
        return sum(state[0].nbytes for layer in self.states[entry] for state in layer)

    @property
    def total_bytes(self) -> int:
        """Everything allocated here, pad page and pad slot included."""
        paged = sum(
            (pages + 1) * group.page_bytes(self.block_size, self.dtype) for group, pages in zip(self.groups, self.pages)
        )
        recorded = 0 if self.recorded is None else self.recorded.nbytes
        return paged + sum(map(self.slot_bytes, self.states)) * (self.slots + 1) + recorded

    def clear_state(self, slots: Tensor) -> None:
        """Zero the recurrent state of `slots` (int64)."""
        for layers in self.states.values():
            for state in (state for layer in layers for state in layer):
                state.index_fill_(0, slots, 0)

    def keep_state(self, slots: Tensor) -> Callable[[], None]:
        """A function that puts the recurrent state of `slots` (int64) back to what it is now, of which it holds a copy."""
        states = [state for layers in self.states.values() for layer in layers for state in layer]
        kept = [state[slots] for state in states]

        def restore() -> None:
            for state, before in zip(states, kept):
                state[slots] = before

        return restore


def state_bytes(model: ServedModel) -> int:
    """Bytes of recurrent state that one slot takes over all layers."""
    entries = [model.state[name] for names in model.mixers for name in names]
    tensors = [tensor for kept in entries if isinstance(kept, Slots) for tensor in kept.tensors.values()]
    return sum(prod(shape) * (dtype or model.dtype).itemsize for shape, dtype in tensors)


def has_recurrent_state(state: Mapping[str, State]) -> bool:
    return any(isinstance(kept, Slots) for kept in state.values())
