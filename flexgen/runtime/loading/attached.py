"""Adapters that requests bring along: kept where their tensors came from, copied into slots of tables that stay where they are.

Every linear weight of a layer, and every expert weight, becomes an `Adapted` with room for some adapters. A slot is written between two
steps, and captured steps read it like any other tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexgen.contract.abi import Layer
from flexgen.contract.weights import Weight
from flexgen.errors import FlexgenError
from flexgen.runtime.loading.adapters import Adapter, Reader, Update
from flexgen.runtime.loading.lora import AdapterError, ExpertLowRank, LowRank
from flexgen.runtime.loading.model import Model
from flexgen.runtime.ops.lora import Adapted

Key = tuple[int | None, str]
"""A layer's index, None outside of layers, and a role."""


@dataclass(frozen=True)
class KeptAdapter:
    """An adapter as its slot will hold it: of each weight A and B, the scale in B, on the device that its tensors were on.

    counts  modules by role, as spec and config promise them
    """

    name: str
    tables: Mapping[Key, tuple[Tensor, Tensor]]
    counts: Mapping[str, int]
    nbytes: int


class Attached:
    """The tables of one model: `slots` adapters of at most `rank`.

    slots_T, slots_R  the slot of each token, and of each row of logits; a step writes them
    targets           last parts of the modules that have room; None: all linear ones and experts of the layers
    """

    def __init__(self, model: Model, slots: int, rank: int, tokens: int, targets: Sequence[str] | None = None) -> None:
        self.model, self.rank = model, rank
        self.reader = Reader(model, move=False)
        self.slots_T, self.slots_R = torch.zeros((2, tokens), dtype=torch.int64, device=model.device)
        self.weights: dict[Key, tuple[Weight, Adapted]] = {}
        for index, layer, weight in _served(model, targets):
            adapted = self._room(model.read(layer, weight.role), weight, slots)
            setattr(layer, weight.role, adapted)
            self.weights[index, weight.role] = weight, adapted
        if not self.weights:
            raise FlexgenError(f"lora_target_modules={list(targets or ())} names no module of {model.package.folder.name}")
        self._written: dict[int, list[Key]] = {}

    @torch.no_grad()
    def _room(self, weight: Tensor, row: Weight, slots: int) -> Adapted:
        if row.kind == "experts":
            count, first, second = weight.shape
            out, into = (second, first) if row.transposed else (first, second)
            a, b = (weight.new_zeros((slots, count, *shape)) for shape in ((self.rank, into), (out, self.rank)))
            return Adapted(weight, a, b, self.slots_T, (out,))
        slots_M = self.slots_R if row.kind == "head" else self.slots_T
        out, into = weight.shape
        a = weight.new_zeros((slots, len(row.parts) * self.rank, into))
        b = weight.new_zeros((slots, out, self.rank))
        return Adapted(weight, a, b, slots_M, tuple(part.rows for part in row.parts))

    @property
    def nbytes(self) -> int:
        """Bytes of all tables."""
        return sum(adapted.nbytes for _, adapted in self.weights.values())

    def read(self, source: Any, name: str | None = None, config: Any = None) -> KeptAdapter:
        """An adapter, checked whole. Raises AdapterError for what is not served, and for what has no room."""
        adapter = self.reader.read(source, name, config)
        modules: dict[Key, dict[str, Sequence[Update]]] = {}
        for (index, module), updates in adapter.updates.items():
            for weight in self.reader.modules[index, module].roles:
                if (index, weight.role) not in self.weights:
                    raise AdapterError(
                        f"adapter {adapter.name} changes {module}, which has no room for adapters of requests: "
                        "load_adapter merges it for all of them, and lora_target_modules says what has room"
                    )
                modules.setdefault((index, weight.role), {})[module] = updates
        tables = {key: self._tables(adapter, key, found) for key, found in modules.items()}
        counts = Counter(role for (_, role), found in modules.items() for _ in found)
        if counts != Counter(adapter.promised):
            raise AdapterError(f"adapter {adapter.name} fills modules {dict(counts)}, and promised {dict(adapter.promised)}")
        return KeptAdapter(adapter.name, tables, counts, sum(a.nbytes + b.nbytes for a, b in tables.values()))

    @torch.no_grad()
    def _tables(self, adapter: Adapter, key: Key, found: Mapping[str, Sequence[Update]]) -> tuple[Tensor, Tensor]:
        weight, adapted = self.weights[key]
        device = next(update.a.device for updates in found.values() for update in updates)
        a, b = (torch.zeros(table.shape[1:], dtype=table.dtype, device=device) for table in (adapted.a, adapted.b))
        needed = _fill_experts(a, b, weight, found) if weight.kind == "experts" else _fill_parts(a, b, weight, found)
        if needed > self.rank:
            raise AdapterError(
                f"adapter {adapter.name} has rank {needed} at {', '.join(found)}, and max_lora_rank is {self.rank}: raise it"
            )
        return a, b

    @torch.no_grad()
    def place(self, slot: int, adapter: KeptAdapter) -> None:
        """Write an adapter into a slot that no launched step will read as another one."""
        stale = [key for key in self._written.pop(slot, ()) if key not in adapter.tables]
        if stale:
            torch._foreach_zero_([self.weights[key][1].b[slot - 1] for key in stale])
        self._written[slot] = list(adapter.tables)
        held = [self.weights[key][1] for key in adapter.tables]
        slots = [table[slot - 1] for adapted in held for table in (adapted.a, adapted.b)]
        torch._foreach_copy_(slots, [table for pair in adapter.tables.values() for table in pair])


def _served(model: Model, targets: Sequence[str] | None) -> list[tuple[int | None, Layer, Weight]]:
    """Weights that get room: linear ones and experts; the embedding and the head, which are large, where they are named."""
    places = [(None, model.weights, "model"), *zip(range(len(model.layers)), model.layers, model.dims.kinds)]
    found = [
        (index, layer, weight)
        for index, layer, kind in places
        for weight in model.table(kind)
        if weight.present and weight.role in model.package.merge.MERGES and _wanted(weight, targets)
    ]  # fmt: skip
    roles = {(index, weight.role) for index, _, weight in found if weight.kind == "experts"}
    return [*found, *((i, layer, w) for i, layer, w in _other_experts(model, roles))]


def _other_experts(model: Model, roles: set[tuple[int | None, str]]) -> list[tuple[int, Layer, Weight]]:
    """Experts have room in both of their weights, or in none."""
    layers = {index for index, _ in roles}
    return [
        (index, layer, weight)
        for index, (layer, kind) in enumerate(zip(model.layers, model.dims.kinds))
        for weight in model.table(kind)
        if index in layers and weight.present and weight.kind == "experts" and (index, weight.role) not in roles
    ]


def _wanted(weight: Weight, targets: Sequence[str] | None) -> bool:
    if targets is None:
        return weight.kind in ("linear", "experts")
    return any(_named(module, targets) for module in weight.modules)


def _named(module: str, targets: Sequence[str]) -> bool:
    return any(module == target or module.endswith(f".{target}") for target in targets)


def _factors(updates: Sequence[Update]) -> tuple[Tensor, Tensor]:
    """Several updates of a module as one: their ranks end to end, the scale in B. (..., R, I) and (..., O, R) in fp32."""
    parts = [each.factors() if isinstance(each, ExpertLowRank) else (each.b, each.a) for each in updates]
    low = torch.cat([a.float() for _, a in parts], -2)
    return low, torch.cat([each.scale * b.float() for each, (b, _) in zip(updates, parts)], -1)


def _fill_parts(a: Tensor, b: Tensor, weight: Weight, found: Mapping[str, Sequence[Update]]) -> int:
    """A (P R, I) and B (O, R) of linear modules end to end. -> the rank that they need; above R nothing is written."""
    rank, start, needed = b.shape[1], 0, 0
    for place, (module, part) in enumerate(zip(weight.modules, weight.parts, strict=True)):
        if module in found:
            low, high = _factors(found[module])
            needed = max(needed, len(low))
            if len(low) <= rank:
                a[place * rank : place * rank + len(low)] = low
                b[start : start + part.rows, : len(low)] = high
        start += part.rows
    return needed


def _fill_experts(a: Tensor, b: Tensor, weight: Weight, found: Mapping[str, Sequence[Update]]) -> int:
    """A (E, R, I) and B (E, O, R): the stacked parameter's updates, then those of single experts' modules, each its own ranks."""
    stacked, *single = weight.modules
    rank, first = a.shape[1], 0
    if stacked in found:
        low, high = _factors(found[stacked])
        first = low.shape[1]
        if first <= rank:
            a[:, :first], b[:, :, :first] = low, high
    rows = b.shape[1] // max(len(single), 1)
    for place, name in enumerate(single):
        widest = 0
        for expert in range(len(a)):
            updates = [each for each in found.get(name.replace("*", str(expert)), ()) if isinstance(each, LowRank)]
            if updates:
                low, high = _factors(updates)
                widest = max(widest, len(low))
                if first + len(low) <= rank:
                    a[expert, first : first + len(low)] = low
                    b[expert, place * rows : (place + 1) * rows, first : first + len(low)] = high
        first += widest
    return first
