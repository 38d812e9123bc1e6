"""One copy of the weights for a trainer and its engine: a live transformers model's tensors become the engine's storage.

Where a weight of the engine is one tensor of the model, that tensor is the storage. Where it is several end to end (q, k, v),
they are copied once into storage of the engine's, of which they then are views, weight after weight: the only extra memory is
one such weight.
"""

from __future__ import annotations

import fnmatch
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexgen.contract.abi import Layer
from flexgen.contract.configs import normalise
from flexgen.contract.weights import Weight
from flexgen.errors import FlexgenError
from flexgen.runtime.loading.config import check_ignored
from flexgen.runtime.loading.model import Model
from flexgen.runtime.loading.package import choose, load_package
from flexgen.runtime.loading.updates import Target, plain_name, targets_of, unreadable, weight_targets


class SharingError(FlexgenError):
    """A tensor that trainer and engine cannot both use: its name, why, and the copy that it would need."""


@dataclass
class Shared:
    """An engine's model and the trainer's tensors that are views of its storage, by the trainer's names.

    copied  bytes that moved once into fused storage; the trainer's own memory of them is free since
    """

    model: Model
    tensors: dict[str, tuple[Tensor, Target]]
    copied: int

    def check(self) -> Counter[str]:
        """Tensors by role. Raises SharingError where the trainer's tensor is another one since."""
        moved = [name for name, (tensor, target) in self.tensors.items() if _place(tensor) != _place(target.view)]
        if moved:
            more = f" and {len(moved) - 8} more" if len(moved) > 8 else ""
            raise SharingError(
                f"{', '.join(moved[:8])}{more}: the trainer's tensor is no longer the engine's storage (it was moved, cast "
                "or replaced); change weights in place, or give them to load_weights"
            )
        return Counter(target.role for _, target in self.tensors.values())

    @property
    def nbytes(self) -> int:
        """Bytes that both use."""
        return sum({_place(tensor): tensor.nbytes for tensor, _ in self.tensors.values()}.values())


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride()


@torch.no_grad()
def share(
    trained: Any,
    *,
    spec: str | None = None,
    generated: str | os.PathLike[str] | None = None,
    ignore_config: Sequence[str] = (),
    head_dtype: torch.dtype | None = None,
) -> Shared:
    """Adopt the tensors of a transformers model, of one wrapped by PEFT too. Nothing is changed if it raises.

    Raises SharingError, and ConfigError where no spec describes the model.
    """
    raw = json.loads(trained.config.to_json_string())
    package = load_package(choose(raw, spec, None if generated is None else Path(generated)))
    config = normalise(raw, package.manifest["text_config"])
    check_ignored(config, ignore_config)
    dims = package.walker.Dims.from_config(config, tuple(ignore_config))
    offered = _tensors(trained, package.walker.PREFIXES)
    first = next(tensor for _, tensor in offered.values() if tensor.is_floating_point())
    model = Model(package, dims, config, first.dtype, torch.device("meta"))
    shapes = targets_of(model)
    found = {name: each for name, each in offered.items() if name in shapes or not _skipped(name, each[0], package.walker.SKIP)}
    _check(model, found, shapes, first.device)
    model.device = first.device
    given = {name: tensor for name, (_, tensor) in found.items()}
    copied = sum(_adopt(model, layer, weight, index, given) for layer, weight, index in list(model.storages()))
    for weight in model.table("model"):
        if weight.same_as is not None:
            setattr(model.weights, weight.role, getattr(model.weights, weight.same_as))
    final = targets_of(model)
    shared = {full: (tensor, final[name]) for name, (full, tensor) in found.items()}
    if head_dtype is not None:
        model.set_head_dtype(head_dtype, keep=True)
    return Shared(model, shared, copied)


def _skipped(name: str, full: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(each, pattern) for each in (name, plain_name(full)) for pattern in patterns)


def _tensors(trained: Any, prefixes: Sequence[str]) -> dict[str, tuple[str, Tensor]]:
    """The model's own tensors by the spec's names, with the names that the model gives them; an adapter's are left out."""
    found: dict[str, tuple[str, Tensor]] = {}
    for full, tensor in trained.state_dict(keep_vars=True).items():
        if ".modules_to_save." in full or ".original_module." in full:
            raise SharingError(f"{full}: modules_to_save are a second copy of a module; train without them, or merge and load_weights")
        if ".lora_" in full:
            continue
        plain = plain_name(full)
        prefix = next((p for p in sorted(prefixes, key=len, reverse=True) if plain.startswith(f"{p}.")), None)
        name = plain if prefix is None else plain.removeprefix(f"{prefix}.")
        found[name] = full, tensor
    return found


def _check(model: Model, found: Mapping[str, tuple[str, Tensor]], targets: Mapping[str, Target], device: torch.device) -> None:
    """Every tensor of the model has a place that it can be a view of, and every weight has its tensors."""
    covered: set[str] = set()
    for name, (full, tensor) in found.items():
        target = targets.get(name)
        if target is None:
            raise SharingError(f"{full} is no weight of {model.package.folder.name}: the spec reads no tensor {name}")
        if problem := unreadable(tensor) or _unshareable(tensor, target, device):
            size = tensor.numel() * target.view.element_size()
            raise SharingError(
                f"{full} {problem}. A copy of it ({size} bytes, and as much of every such tensor) is what LLM(directory) and "
                "load_weights make"
            )
        if target.tied and tensor is not next(other for each, (_, other) in found.items() if targets[each].role == target.role):
            raise SharingError(f"{full} is not the embedding although config.json ties them: call tie_weights() on the model first")
        covered.update(target.covers)
    lacking = sorted({cover for target in targets.values() for cover in target.covers} - covered)
    if lacking:
        raise SharingError(f"the model lacks {', '.join(lacking[:8])}, which {model.package.folder.name} reads")


def _unshareable(tensor: Tensor, target: Target, device: torch.device) -> str | None:
    if tuple(tensor.shape) != target.shape:
        return f"has shape {tuple(tensor.shape)}; the spec and config.json make it {target.shape}"
    if tensor.dtype != target.view.dtype:
        return f"is {tensor.dtype}, and the engine keeps it as {target.view.dtype}"
    if tensor.device != device:
        return f"is on {tensor.device}, and the model's first on {device}: an engine is on one device"
    if not target.view.is_contiguous():
        return "lies in another order than the engine's storage"
    if not tensor.is_contiguous():
        return "is not contiguous"
    if tensor.is_inference():
        return "was made in inference mode, and cannot be trained"
    return None


def _adopt(model: Model, layer: Layer, weight: Weight, index: int | None, given: Mapping[str, Tensor]) -> int:
    """Give one weight its storage, and the model's tensors that are part of it. -> bytes copied."""
    names = [name for name, target in _named(model, layer, weight, index).items() if name in given]
    if len(names) == 1:
        setattr(layer, weight.role, given[names[0]].detach())
        return 0
    first = given[names[0]]
    storage = torch.empty(weight.shape, dtype=first.dtype, device=first.device)
    setattr(layer, weight.role, storage)
    for name, target in _named(model, layer, weight, index).items():
        if name in given:
            target.view.copy_(given[name])
            given[name].data = target.view
    return storage.nbytes


def _named(model: Model, layer: Layer, weight: Weight, index: int | None) -> dict[str, Target]:
    return dict(weight_targets(getattr(layer, weight.role), weight, index))
