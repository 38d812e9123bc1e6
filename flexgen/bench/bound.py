"""The fastest that a decode step can be: the bytes that it must read over the bandwidth of the device."""

from __future__ import annotations

from dataclasses import dataclass

from flexgen.contract.state import Pages, SharedPages
from flexgen.runtime.loading.model import Model
from flexgen.runtime.scheduling.pools import state_bytes

H200_BYTES_PER_SECOND = 4.15e12
"""Read bandwidth of an H200, measured with a reduction over 4 GB."""


@dataclass(frozen=True)
class StepBytes:
    """Bytes that one decode step reads, by what they are."""

    dense: int
    experts: int
    pages: int
    state: int

    @property
    def total(self) -> int:
        return self.dense + self.experts + self.pages + self.state


def step_bytes(model: Model, rows: int, context: float, experts_touched: float | None) -> StepBytes:
    """What a step of `rows` requests of `context` tokens each must read.

    experts_touched  distinct experts of one layer that the step's tokens go to, on average over layers; None without
    Of an embedding that is not the head too, each token reads a row. Writes (keys, values, state) are left out.
    """
    dense = experts = 0
    heads = {weight.same_as for weight in model.table("model")}
    stacked = {weight.role for _, weight, _ in model.storages() if weight.layouts}
    for layer, weight, _ in model.storages():
        tensor = getattr(layer, weight.role)
        size = tensor.numel() * tensor.element_size()
        if weight.role.removesuffix("_bias") in stacked:
            experts += int(size * experts_touched / tensor.shape[0])
        elif weight.role.startswith("embed_tokens") and weight.role not in heads:
            dense += rows * tensor.shape[1] * tensor.element_size()
        else:
            dense += size
    pages = 0
    for mixers in model.mixers:
        for entry in mixers:
            kept = model.state[entry]
            kept = model.state[kept.owner] if isinstance(kept, SharedPages) else kept
            if isinstance(kept, Pages):
                keys = context if kept.window is None else min(context, kept.window)
                pages += int(2 * keys * kept.kv_heads * kept.head_dim * model.dtype.itemsize)
    return StepBytes(dense, experts, rows * pages, rows * state_bytes(model))
