"""Reads safetensors files straight into the engine's storage, and accounts for every tensor both ways."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flexgen.runtime.abi import ExpertLayout, Mxfp4, PerExpert, Stacked, Weight
from flexgen.runtime.errors import FlexgenError
from flexgen.runtime.mxfp4 import dequantise


class CheckpointError(FlexgenError):
    """A checkpoint that cannot be loaded: which file or tensor, what was expected, what to do."""


@dataclass
class LoadReport:
    """What a load did: tensors read, tensors skipped by name, bytes read."""

    read: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    bytes: int = 0


class Checkpoint:
    """The tensors of a checkpoint directory by name, prefix removed; nothing is read until it is asked for."""

    def __init__(self, directory: Path, prefixes: Sequence[str], skip: Sequence[str]) -> None:
        self.directory = directory
        self.report = LoadReport()
        self._files = {path: _open(path) for path in _find_files(directory)}
        names = {name: path for path, file in self._files.items() for name in file.keys()}  # noqa: SIM118
        self.prefix = _choose_prefix(names, prefixes, directory)
        self._where: dict[str, tuple[Path, str]] = {}
        self._unread: dict[str, str] = {}
        for full, path in names.items():
            name = full.removeprefix(f"{self.prefix}.")
            pattern = next((p for p in skip if fnmatch.fnmatchcase(full, p) or fnmatch.fnmatchcase(name, p)), None)
            if name in self._where:
                raise CheckpointError(f"{directory} holds {name} twice, with and without the prefix {self.prefix}")
            self._where[name] = path, full
            if pattern is None:
                self._unread[name] = full
            else:
                self.report.skipped[pattern] = self.report.skipped.get(pattern, 0) + 1

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, from the file's header."""
        path, full = self._where[name]
        return tuple(self._files[path].get_slice(full).get_shape())

    def read(self, name: str) -> Tensor:
        """One tensor, marked as read."""
        path, full = self._where[name]
        try:
            tensor = self._files[path].get_tensor(full)
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged at {full}: {error}; download it again") from None
        self._unread.pop(name, None)
        self.report.read += 1
        self.report.bytes += tensor.numel() * tensor.element_size()
        return tensor

    def finish(self) -> LoadReport:
        """Raises CheckpointError for tensors that nothing read; else the report."""
        if self._unread:
            names = sorted(self._unread.values())
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            raise CheckpointError(
                f"{self.directory} holds tensors that the spec does not read: {', '.join(names[:8])}{more}. If they are not "
                "part of the forward pass, list them in the spec's `checkpoint.skip`"
            )
        return self.report


def _find_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (json.JSONDecodeError, KeyError) as error:
            raise CheckpointError(f"{index} is damaged: {error}") from None
        missing = [name for name in names if not (directory / name).exists()]
        if missing:
            raise CheckpointError(f"{directory} lacks {', '.join(missing)}, which {index.name} lists")
        return [directory / name for name in names]
    found = sorted(directory.glob("*.safetensors"))
    if found:
        return found
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in directory.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{directory} holds {', '.join(pickles)}, which are pickles and can run code. Convert them once where you trust "
            "them: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OUT)"
        )
    raise CheckpointError(f"{directory} holds no safetensors files")


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is truncated or damaged: {error}; download it again") from None


def _choose_prefix(names: Mapping[str, Path], prefixes: Sequence[str], directory: Path) -> str:
    fitting = [p for p in prefixes if any(name.startswith(f"{p}.layers.") for name in names)]
    if len(fitting) != 1:
        found = f"both {' and '.join(fitting)}" if fitting else "none"
        raise CheckpointError(f"{directory}: expected layers below one of {', '.join(prefixes)}, found {found}")
    return fitting[0]


# ---------------------------------------------------------------- into storage


@torch.no_grad()
def fill(storage: Tensor, weight: Weight, layer: int | None, checkpoint: Checkpoint) -> None:
    """Read one weight's tensors into its storage. Raises CheckpointError for what is missing or of another shape."""
    if weight.parts:
        start = 0
        for part in weight.parts:
            name = _numbered(part.name, layer)
            target = storage[start : start + part.rows]
            _place(target, _need(name, target.shape, checkpoint, weight))
            start += part.rows
        return
    matching = [layout for layout in weight.layouts if _holds(layout, layer, checkpoint)]
    if len(matching) != 1:
        found = "several of them" if matching else "none of them"
        raise CheckpointError(
            f"{checkpoint.directory}: {weight.role} of layer {layer} can be stored as {weight.layouts}; found {found}"
        )
    _fill_experts(storage, matching[0], layer, checkpoint, weight)


def _fill_experts(
    storage: Tensor, layout: ExpertLayout, layer: int | None, checkpoint: Checkpoint, weight: Weight
) -> None:
    if isinstance(layout, Stacked):
        shape = tuple(storage.shape)
        wanted = (shape[0], shape[2], shape[1]) if layout.transpose else shape
        tensor = _need(_numbered(layout.name, layer), wanted, checkpoint, weight)
        _place(storage, tensor.transpose(1, 2) if layout.transpose else tensor)
    elif isinstance(layout, PerExpert):
        rows = storage.shape[1] // len(layout.names)
        for expert in range(storage.shape[0]):
            for index, name in enumerate(layout.names):
                target = storage[expert, index * rows : (index + 1) * rows]
                _place(target, _need(_numbered(name, layer).replace("*", str(expert)), target.shape, checkpoint, weight))
    else:
        name = _numbered(layout.name, layer)
        blocks, scales = checkpoint.read(f"{name}_blocks"), checkpoint.read(f"{name}_scales")
        tensor = dequantise(blocks, scales, torch.bfloat16)
        if tensor.shape != storage.shape:
            raise CheckpointError(f"{name} has shape {tuple(tensor.shape)} dequantised; expected {tuple(storage.shape)}")
        _place(storage, tensor)


def _holds(layout: ExpertLayout, layer: int | None, checkpoint: Checkpoint) -> bool:
    if isinstance(layout, Mxfp4):
        return f"{_numbered(layout.name, layer)}_blocks" in checkpoint
    name = layout.name if isinstance(layout, Stacked) else layout.names[0]
    return _numbered(name, layer).replace("*", "0") in checkpoint


def _need(name: str, shape: Sequence[int], checkpoint: Checkpoint, weight: Weight) -> Tensor:
    if name not in checkpoint:
        raise CheckpointError(f"{checkpoint.directory} lacks {name}, which fills {weight.role}")
    found = checkpoint.shape(name)
    if found != tuple(shape):
        raise CheckpointError(f"{name} has shape {found}; the spec and config.json make it {tuple(shape)}")
    return checkpoint.read(name)


def _place(target: Tensor, tensor: Tensor) -> None:
    target.copy_(tensor)


def _numbered(name: str, layer: int | None) -> str:
    return name if layer is None else name.replace("*", str(layer), 1)


def check_tied(storage: Tensor, weight: Weight, checkpoint: Checkpoint) -> None:
    """A tied checkpoint may still hold the head: it must then equal the embedding."""
    name = weight.parts[0].name
    if name in checkpoint and not torch.equal(checkpoint.read(name).to(storage), storage):
        raise CheckpointError(
            f"{name} differs from the embedding although config.json ties them: set tie_word_embeddings to false"
        )
