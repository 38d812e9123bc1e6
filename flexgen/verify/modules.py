"""Which module of the reference stands behind which weight, found by the spec's tensor names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flexgen.contract.weights import Mxfp4, PerExpert, Stacked, Weight
from flexgen.errors import FlexgenError
from flexgen.runtime.loading.model import Model


class Modules:
    """The reference's modules by the weights of a generated package.

    layers    the decoder layers, in order
    by_role   (layer index or None, role) -> names of the modules whose outputs, end to end, are that weight's product
    """

    def __init__(self, model: Model, reference: Any) -> None:
        self.named: dict[str, torch.nn.Module] = dict(reference.named_modules())
        self.prefixes: Sequence[str] = model.package.walker.PREFIXES
        self.by_role: dict[tuple[int | None, str], tuple[str, ...]] = {}
        lists: set[str] = set()
        for index, kind in [(None, "model"), *enumerate(model.dims.kinds)]:
            for weight in model.table(kind):
                self._add(index, weight, lists)
        (path,) = lists
        found = [self._find(f"{path}.{index}") for index in range(len(model.layers))]
        self.layers = [name for name in found if name is not None]
        if len(self.layers) != len(model.layers):
            raise FlexgenError(f"the reference has {len(self.layers)} layers at {path}, the package {len(model.layers)}")

    def _add(self, index: int | None, weight: Weight, lists: set[str]) -> None:
        tensors = [part.name for part in weight.parts]
        if weight.layouts:
            tensors = [one.name for one in weight.layouts if isinstance(one, Stacked | Mxfp4)][:1]
            tensors += [one.names[0] for one in weight.layouts if isinstance(one, PerExpert)][: not tensors]
        lists |= {name.split(".*")[0] for name in tensors if ".*" in name}
        owners = [self._owner(name.replace("*", str(index), 1)) for name in tensors]
        if weight.present and all(owner is not None for owner in owners):
            self.by_role[index, weight.role] = tuple(owner for owner in owners if owner is not None)

    def _owner(self, tensor: str) -> str | None:
        """The module that holds a tensor; of experts saved one by one, the module that holds them all."""
        return self._find(tensor.split(".*")[0] if ".*" in tensor else tensor.rpartition(".")[0])

    def _find(self, name: str) -> str | None:
        tried = [*(f"{prefix}.{name}" for prefix in self.prefixes), name]
        return next((full for full in tried if full in self.named), None)

    def watched(self) -> dict[str, torch.nn.Module]:
        """Every module that a comparison may need."""
        names = {name for names in self.by_role.values() for name in names} | set(self.layers)
        return {name: self.named[name] for name in names}
