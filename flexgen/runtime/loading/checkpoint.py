"""Reads safetensors files straight into the engine's storage, and accounts for every tensor both ways."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flexgen.contract.json_files import listed, read_object, shown
from flexgen.contract.weights import ExpertLayout, Mxfp4, PerExpert, Stacked, Weight
from flexgen.errors import FlexgenError
from flexgen.runtime.loading.mxfp4 import dequantise
from flexgen.runtime.transfer import Staging

log = logging.getLogger(__name__)

_MOST_INDEX_BYTES = 2**26
"""Of an index of shards: one of a million tensors."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""What a tensor may be stored as. Narrower formats need scales, so they are never read as plain numbers."""

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64, "U8": torch.uint8}


class CheckpointError(FlexgenError):
    """A checkpoint that cannot be loaded: which file or tensor, what was expected, what to do.

    what    without what to do about a file of one's own
    role    of the weight that it is about, where it is about one
    """

    def __init__(self, what: str, advice: str = "", role: str | None = None) -> None:
        super().__init__(what + advice)
        self.what, self.role = what, role


@dataclass
class LoadReport:
    """What a load did: tensors read, tensors left out by pattern of the spec's `skip`, bytes read."""

    read: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    bytes: int = 0


class Checkpoint:
    """The tensors of a checkpoint directory by name, prefix removed; nothing is read until it is asked for."""

    def __init__(self, directory: Path, prefixes: Sequence[str], skip: Sequence[str], layer: str = "layers.*") -> None:
        self.directory = directory
        self.report = LoadReport()
        self._skip = tuple(skip)
        self._files = {path: _open(path) for path in _find_files(directory)}
        names = _names(self._files)
        self.prefix = _choose_prefix(names, prefixes, layer.split("*")[0], directory)
        self._where: dict[str, tuple[Path, str]] = {}
        for full, path in names.items():
            name = full.removeprefix(f"{self.prefix}.") if self.prefix else full
            if name in self._where:
                raise CheckpointError(f"{directory} holds {name} twice, with and without the prefix {self.prefix}")
            self._where[name] = path, full
        self._unread = {name: full for name, (_, full) in self._where.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, from the file's header."""
        path, full = self._where[name]
        return tuple(self._files[path].get_slice(full).get_shape())

    def entries(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype, Callable[[], Tensor]]]:
        """Every tensor: its full name, shape and dtype from the file's header, and how to read it."""
        for name, (path, full) in self._where.items():
            header = self._files[path].get_slice(full).get_dtype()
            if header not in _DTYPES:
                raise CheckpointError(f"{path} holds {full} as {header}, and a weight is one of {', '.join(_DTYPES)}")
            yield full, self.shape(name), _DTYPES[header], partial(self.read, name)

    def read(self, name: str) -> Tensor:
        """One tensor, marked as read."""
        path, full = self._where[name]
        try:
            tensor = self._files[path].get_tensor(full)
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged at {full}: {error}; download it again") from None
        if tensor.dtype not in FLOATS and not name.endswith(_MXFP4_PARTS):
            raise CheckpointError(
                f"{path} holds {full} as {tensor.dtype}, and a weight is one of {', '.join(map(str, FLOATS))}; "
                "dequantise the checkpoint first"
            )
        self._unread.pop(name, None)
        self.report.read += 1
        self.report.bytes += tensor.numel() * tensor.element_size()
        return tensor

    def finish(self) -> LoadReport:
        """Raises CheckpointError for tensors that nothing read and the spec does not skip; else the report."""
        names = []
        for name, full in sorted(self._unread.items()):
            forms = (full, name, f"model.{full}")  # the last is what a file lacks whose names begin below `model`
            pattern = next((p for p in self._skip if any(fnmatch.fnmatchcase(form, p) for form in forms)), None)
            if pattern is None:
                names.append(full)
            else:
                self.report.skipped[pattern] = self.report.skipped.get(pattern, 0) + 1
        if names:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            raise CheckpointError(
                f"{self.directory} holds tensors that the spec does not read: {', '.join(names[:8])}{more}",
                ". If they are not part of the forward pass, list them in the spec's `checkpoint.skip`; if they are, config.json "
                "does not fit",
            )
        return self.report


def _find_files(directory: Path) -> list[Path]:
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.exists():
        files = _indexed(index)
        missing = [path for path in files if not path.exists()]
        if not missing:
            return files
        if len(missing) == len(files) and single.is_file():
            log.warning("%s is stale: none of its files is there; reading %s instead", index, single.name)
            return [single]
        beside = f"; {single.name} is there too, so if it is whole, remove {index.name}" if single.is_file() else ""
        names = listed([path.name for path in missing])
        raise CheckpointError(f"{directory} lacks {names}, which {index.name} lists{beside}")
    if found := [single] if single.exists() else sorted(directory.glob("*.safetensors")):
        return found
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in directory.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{directory} holds {listed(pickles)}, which are pickles and can run code. Convert them once where you trust "
            "them: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OUT)"
        )
    raise CheckpointError(f"{directory} holds no safetensors files")


def _indexed(index: Path) -> list[Path]:
    """The files that an index lists, each a name inside the model's own folder."""
    weight_map = read_object(index, _MOST_INDEX_BYTES, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} is damaged: its weight_map is {shown(weight_map)}; download it again")
    names = set()
    for tensor, name in weight_map.items():
        plain = isinstance(name, str) and 0 < len(name) <= 255 and Path(name).name == name and name not in (".", "..")
        if not plain or "\\" in name or "\0" in name:
            raise CheckpointError(f"{index} is damaged: the file of {shown(tensor)} is {shown(name)}, and must be a name in its own folder")
        names.add(name)
    return [index.parent / name for name in sorted(names)]


def _open(path: Path) -> safe_open:
    if not path.is_file():
        raise CheckpointError(f"{path} is no plain file")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is truncated or damaged: {error}; download it again") from None


def _names(files: Mapping[Path, safe_open]) -> dict[str, Path]:
    """The file of each tensor."""
    names: dict[str, Path] = {}
    for path, file in files.items():
        for name in file.keys():  # noqa: SIM118
            if name in names:
                raise CheckpointError(f"both {names[name]} and {path} hold {name}; remove the file that is not the model's")
            names[name] = path
    return names


def _choose_prefix(names: Mapping[str, Path], prefixes: Sequence[str], layers: str, directory: Path) -> str:
    def fits(prefix: str) -> bool:
        return any(name.startswith(f"{prefix}.{layers}" if prefix else layers) for name in names)

    fitting = [p for p in prefixes if fits(p)]
    if not fitting:  # a model saved without its head has no `model.` before its names
        bare = [p.removeprefix("model").removeprefix(".") for p in prefixes]
        fitting = [p for p in dict.fromkeys(bare) if fits(p)]
    if len(fitting) != 1:
        found = f"them below {' and '.join(fitting)}" if fitting else f"names like {', '.join(sorted(names)[:3])}"
        raise CheckpointError(f"{directory}: expected layers below exactly one of {', '.join(prefixes)}, found {found}")
    return fitting[0]


_MXFP4_PARTS = ("_blocks", "_scales")


@torch.no_grad()
def fill(storage: Tensor, weight: Weight, layer: int | None, checkpoint: Checkpoint, staging: Staging) -> None:
    """Read one weight's tensors into its storage. Raises CheckpointError for what is missing or of another shape."""
    if weight.parts:
        start = 0
        for part in weight.parts:
            name = _numbered(part.name, layer)
            target = storage[start : start + part.rows] if storage.dim() else storage
            staging.copy(target, _need(name, target.shape, checkpoint, weight))
            start += part.rows
        return
    matching = [layout for layout in weight.layouts if _holds(layout, layer, checkpoint)]
    if len(matching) != 1:
        possible = "; ".join(" and ".join(_names_of(layout, layer)) for layout in weight.layouts)
        found = "more than one of them" if matching else "none of them"
        raise CheckpointError(
            f"{checkpoint.directory}: {weight.role} of layer {layer} is stored as exactly one of: {possible}; found {found}"
        )
    _fill_experts(storage, matching[0], layer, checkpoint, weight, staging)


def _fill_experts(
    storage: Tensor, layout: ExpertLayout, layer: int | None, checkpoint: Checkpoint, weight: Weight, staging: Staging
) -> None:
    if isinstance(layout, Stacked):
        target = storage.transpose(1, 2) if layout.transpose else storage
        staging.copy(target, _need(_numbered(layout.name, layer), target.shape, checkpoint, weight))
    elif isinstance(layout, PerExpert):
        rows = storage.shape[1] // len(layout.names)
        for expert in range(storage.shape[0]):
            for index, name in enumerate(layout.names):
                target = storage[expert, index * rows : (index + 1) * rows]
                tensor = _need(_numbered(name, layer).replace("*", str(expert)), target.shape, checkpoint, weight)
                staging.copy(target, tensor)
    else:
        experts, inner, out = storage.shape
        groups = inner // 32
        shapes = ((experts, out, groups, 16), (experts, out, groups))
        parts = zip(_names_of(layout, layer), shapes, strict=True)
        blocks, scales = (_need(name, shape, checkpoint, weight).to(storage.device) for name, shape in parts)
        storage.copy_(dequantise(blocks, scales, torch.bfloat16))


def _names_of(layout: ExpertLayout, layer: int | None) -> tuple[str, ...]:
    """The tensors of a layout, expert 0's where each expert has its own."""
    if isinstance(layout, Mxfp4):
        return tuple(f"{_numbered(layout.name, layer)}{part}" for part in _MXFP4_PARTS)
    names = (layout.name,) if isinstance(layout, Stacked) else layout.names
    return tuple(_numbered(name, layer).replace("*", "0") for name in names)


def _holds(layout: ExpertLayout, layer: int | None, checkpoint: Checkpoint) -> bool:
    return any(name in checkpoint for name in _names_of(layout, layer))


def _need(name: str, shape: Sequence[int], checkpoint: Checkpoint, weight: Weight) -> Tensor:
    if name not in checkpoint:
        raise CheckpointError(
            f"{checkpoint.directory} lacks {name}, which {weight.role} needs",
            "; if it was downloaded in part, download it again, else config.json does not fit",
            weight.role,
        )
    found = checkpoint.shape(name)
    if found != tuple(shape):
        raise CheckpointError(f"{name} has shape {found}; the spec and config.json make it {tuple(shape)}", role=weight.role)
    return checkpoint.read(name)


def _numbered(name: str, layer: int | None) -> str:
    return name if layer is None else name.replace("*", str(layer), 1)


def check_tied(storage: Tensor, weight: Weight, checkpoint: Checkpoint) -> None:
    """A tied checkpoint may still hold the head: it must then equal the embedding."""
    name = weight.parts[0].name
    if name in checkpoint and not torch.equal(_need(name, storage.shape, checkpoint, weight).to(storage), storage):
        raise CheckpointError(
            f"{name} differs from the embedding although config.json ties them: set tie_word_embeddings to false"
        )
