"""Merged adapters: what a layer reads is pristine + the sum of updates, in storage of its own that stays where it is.

Only weights that an adapter touches get such a shadow. A shadow outlives its adapter, as a copy of the pristine weight: graphs
read it, and the next adapter takes it. Every merge starts from the pristine weight, so that none leaves a trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flexgen.contract.abi import Layer
from flexgen.contract.weights import Weight
from flexgen.runtime.loading.adapters import Adapter, Reader, Update
from flexgen.runtime.loading.lora import AdapterError
from flexgen.runtime.loading.model import Model


@dataclass
class AdapterUpdate:
    """What a merge did.

    counts   modules that the merged adapters change, by role     skipped  modules by pattern of the spec's `skip`
    version  of the weights since
    """

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    version: int = 0


@dataclass
class _Loaded:
    """An adapter and where it comes from, which a refresh reads again."""

    adapter: Adapter
    source: Any
    config: Any


class Merger:
    """The merged adapters of one model."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.reader = Reader(model)
        self.loaded: dict[str, _Loaded] = {}
        self._last = Counter[str]()
        model.follow = self._merge_all

    def load(self, source: Any, name: str | None, config: Any) -> AdapterUpdate:
        """Merge one more adapter. Raises AdapterError, and then changes nothing."""
        adapter = self.reader.read(source, _name_in(source, name), config)
        name = name or adapter.name
        if name in self.loaded:
            raise AdapterError(f"an adapter called {name} is merged already: refresh_adapter reads it again, or give another name")
        return self._apply(name, _Loaded(adapter, source, config))

    def refresh(self, name: str | None, source: Any = None, config: Any = None) -> AdapterUpdate:
        """Read a merged adapter again, from another source if one is given."""
        name = self._known(name)
        old = self.loaded[name]
        source, config = (old.source, old.config) if source is None else (source, config or old.config)
        return self._apply(name, _Loaded(self.reader.read(source, _name_in(source, name), config), source, config))

    def unload(self, name: str | None) -> AdapterUpdate:
        """Weights without one adapter: the pristine ones, bit for bit, where no other changes them."""
        name = self._known(name)
        del self.loaded[name]
        return self._written(AdapterUpdate(name))

    def _known(self, name: str | None) -> str:
        if name is None and len(self.loaded) == 1:
            return next(iter(self.loaded))
        if name not in self.loaded:
            raise AdapterError(f"no adapter called {name!r} is merged; there are {sorted(self.loaded)}")
        return name

    def _apply(self, name: str, loaded: _Loaded) -> AdapterUpdate:
        for layer, weight in self._touched(loaded.adapter):
            self.model.shadow(layer, weight)
        before, done = dict(self.loaded), False
        self.loaded[name] = loaded
        try:
            update = self._written(AdapterUpdate(name, skipped=Counter(loaded.adapter.skipped)))
            done = True
        finally:
            if not done:
                self.loaded = before
                self.model.weights_written()
        return update

    def _written(self, update: AdapterUpdate) -> AdapterUpdate:
        self.model.weights_written()  # which merges
        update.counts, update.version = self._last, self.model.weight_version
        return update

    def _touched(self, adapter: Adapter) -> list[tuple[Layer, Weight]]:
        found: dict[tuple[Layer, str], Weight] = {}
        for place in adapter.updates:
            layer = self.model.weights if place[0] is None else self.model.layers[place[0]]
            for weight in self.reader.modules[place].roles:
                found[layer, weight.role] = weight
        return [(layer, weight) for (layer, _), weight in found.items()]

    @torch.no_grad()
    def _merge_all(self) -> None:
        """Write every shadow anew, and compare the modules that changed with those that the adapters promise."""
        merges, model = self.model.package.merge.MERGES, self.model
        deltas: dict[int | None, dict[str, list[Update]]] = {}
        for each in self.loaded.values():
            for (index, module), updates in each.adapter.updates.items():
                deltas.setdefault(index, {}).setdefault(module, []).extend(updates)
        counts = Counter[str]()
        for index, layer, weight in self._shadowed():
            below: dict[str, Sequence[Update]] = dict(deltas.get(index, {}))
            counts[weight.role] += merges[weight.role](getattr(layer, weight.role), model.stored(layer, weight), weight, below)
        counts = +counts
        promised = {place for each in self.loaded.values() for place in each.adapter.updates}
        wanted = Counter(weight.role for place in promised for weight in self.reader.modules[place].roles)
        if counts != wanted:
            raise AdapterError(f"a merge changed modules {dict(counts)}, and the adapters promised {dict(wanted)}")
        self._last = counts

    def _shadowed(self) -> list[tuple[int | None, Layer, Weight]]:
        """The weights that layers read as copies, those of a wider head too."""
        places = [(None, self.model.weights, "model"), *zip(range(len(self.model.layers)), self.model.layers, self.model.dims.kinds)]
        return [
            (index, layer, weight)
            for index, layer, kind in places
            for weight in self.model.table(kind)
            if weight.present and getattr(layer, weight.role) is not self.model.stored(layer, weight)
            and weight.role in self.model.package.merge.MERGES
        ]  # fmt: skip


def _name_in(source: Any, name: str | None) -> str | None:
    """What an adapter is called where it comes from: a PeftModel's own names are asked for only where it has that one."""
    return name if not hasattr(source, "peft_config") or name in source.peft_config else None
