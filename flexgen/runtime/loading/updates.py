"""New values for weights that are already served: names found, everything checked, counted, written in place.

What can be checked before the first write is: all of a list, a mapping or a checkpoint; a lazy iterable tensor by tensor. A
load that fails once it has written leaves `Model.missing_weights`, and the engine then refuses to answer.
"""

from __future__ import annotations

import fnmatch
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexgen.contract.weights import Mxfp4, Stacked, Weight
from flexgen.errors import FlexgenError
from flexgen.runtime.loading.checkpoint import FLOATS, Checkpoint
from flexgen.runtime.loading.model import Model
from flexgen.runtime.loading.mxfp4 import dequantise
from flexgen.runtime.transfer import Staging

if TYPE_CHECKING:
    from flexgen.runtime.loading.remote import Receiver

ADAPTER_MARKS = (".lora_", ".original_module", ".modules_to_save.")
"""Parts of a name that only an adapter's own tensors have."""

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "modules_to_save.default.", "base_layer.")
"""What wrappers of a training process put into the names of the tensors they hold."""


class UpdateError(FlexgenError):
    """An update that does not fit the model: which tensor, what was found, what was expected."""


@dataclass(frozen=True)
class Entry:
    """One tensor on offer. `shape` and `dtype` are known before `read` fetches it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


Source = str | os.PathLike[str] | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class Target:
    """Where a tensor goes: a view of the role's storage. `covers` names what it fills, a name an expert where files may have that.

    tied    the name of a head that shares the embedding's storage
    packed  for half of an MXFP4 pair, the name of the whole
    """

    role: str
    view: Tensor
    shape: tuple[int, ...]
    covers: tuple[str, ...]
    tied: bool = False
    packed: str | None = None


@dataclass
class Update:
    """What an update did.

    counts   tensors by role      skipped  tensors by pattern of the spec's `skip`
    bytes    as they were sent    version  of the weights since
    """

    counts: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    version: int = 0


def plain_name(name: str) -> str:
    """A parameter's name as its checkpoint has it, without what PEFT and wrappers of training add."""
    while name.startswith("base_model.model."):
        name = name.removeprefix("base_model.model.")
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def targets_of(model: Model) -> dict[str, Target]:
    """Every name that the spec reads, in every form it may have, without the prefix."""
    found: dict[str, Target] = {}
    for layer, weight, index in model.storages():
        found.update(weight_targets(model.stored(layer, weight), weight, index))
    for weight in model.table("model"):
        if weight.same_as is not None and weight.present:
            owner = next(target for target in found.values() if target.role == weight.same_as)
            found[weight.parts[0].name] = Target(owner.role, owner.view, owner.shape, owner.covers, tied=True)
    return found


def weight_targets(storage: Tensor, weight: Weight, layer: int | None) -> Iterator[tuple[str, Target]]:
    def numbered(name: str) -> str:
        return name if layer is None else name.replace("*", str(layer), 1)

    start = 0
    for part in weight.parts:
        view, name = storage[start : start + part.rows], numbered(part.name)
        yield name, Target(weight.role, view, tuple(view.shape), (name,))
        start += part.rows
    experts = [layout for layout in weight.layouts if not isinstance(layout, Stacked | Mxfp4)]
    single = dict(_per_expert(storage, weight, [numbered(name) for layout in experts for name in layout.names]))
    yield from single.items()
    for layout in weight.layouts:
        if isinstance(layout, Stacked):
            view, name = storage.transpose(1, 2) if layout.transpose else storage, numbered(layout.name)
            yield name, Target(weight.role, view, tuple(view.shape), tuple(single) or (name,))
        elif isinstance(layout, Mxfp4):
            (count, inner, out), name = storage.shape, numbered(layout.name)
            for half, shape in (("_blocks", (count, out, inner // 32, 16)), ("_scales", (count, out, inner // 32))):
                yield name + half, Target(weight.role, storage, shape, (name,), packed=name)


def _per_expert(storage: Tensor, weight: Weight, names: Sequence[str]) -> Iterator[tuple[str, Target]]:
    rows = storage.shape[1] // len(names) if names else 0
    for expert in range(storage.shape[0] if names else 0):
        for place, name in enumerate(names):
            view, full = storage[expert, place * rows : (place + 1) * rows], name.replace("*", str(expert))
            yield full, Target(weight.role, view, tuple(view.shape), (full,))


class Updater:
    """Writes updates into one model's storage. Makes its table of names once: storage never moves."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.targets = targets_of(model)
        self.names = {name for target in self.targets.values() for name in target.covers}
        walker = model.package.walker
        self._prefixes = sorted(walker.PREFIXES, key=len, reverse=True)
        self._skip: Sequence[str] = walker.SKIP
        self._heads = {weight.role for weight in model.table("model") if weight.kind == "head"}
        self._staging: Staging | None = None

    def load(self, source: Source) -> Update:
        """Write every tensor of the source. A directory must hold all that the spec reads; anything else may hold a part.

        Raises UpdateError, and CheckpointError for a directory. Unless `Model.missing_weights` says otherwise afterwards,
        nothing was changed then.
        """
        run = _Run(self)
        if isinstance(source, str | os.PathLike):
            return run.all(self._on_disk(Path(source).expanduser()), complete=True)
        if isinstance(source, Mapping):
            source = list(source.items())
        if isinstance(source, Sequence):
            return run.all([_entry(each) for each in source], complete=False)
        return run.each(_entry(each) for each in source)

    def receive(self, receiver: Receiver) -> Update:
        """Write what another process sends. What does not fit is refused before it is sent, at both ends."""
        run, refusal = _Run(self), None
        try:
            return run.all(receiver.entries, complete=False, ready=lambda: receiver.answer(None))
        except (UpdateError, RuntimeError) as error:
            refusal = str(error)
            raise
        finally:
            if receiver.going:
                receiver.drain()
            else:
                receiver.answer(refusal or "the engine was interrupted")

    def _on_disk(self, directory: Path) -> list[Entry]:
        walker = self.model.package.walker
        return [Entry(*each) for each in Checkpoint(directory, walker.PREFIXES, walker.SKIP).entries()]

    def find(self, name: str) -> tuple[str, Target] | str:
        """The plain name and target of a tensor, or the pattern that skips it. Raises UpdateError for an unknown name."""
        full = plain_name(name)
        prefix = next((prefix for prefix in self._prefixes if full.startswith(f"{prefix}.")), None)
        short = full if prefix is None else full.removeprefix(f"{prefix}.")
        if any(mark in name.replace(".modules_to_save.default.", ".") for mark in ADAPTER_MARKS):
            raise UpdateError(
                f"{name} is a tensor of an adapter, and weights without it are another model: merge the adapter "
                "(`merge_adapter()`) and send the merged weights alone"
            )
        if short in self.targets:
            return short, self.targets[short]
        for pattern in self._skip:
            if fnmatch.fnmatchcase(full, pattern) or fnmatch.fnmatchcase(short, pattern):
                return pattern
        raise UpdateError(f"{name} is no weight of {self.model.package.folder.name}: the spec reads no tensor {short}")

    @torch.no_grad()
    def write(self, target: Target, tensor: Tensor) -> None:
        view = target.view
        if tensor.data_ptr() == view.data_ptr() and tensor.dtype == view.dtype and tensor.device == view.device:
            return  # the trainer's tensor is this storage
        if target.role in self._heads and self.model.head_dtype is not None:
            tensor = tensor.to(self.model.dtype)  # a head kept wider is a copy of the one in the model's dtype
        if view.device.type == "cuda" and tensor.device.type == "cpu":
            self._staging = self._staging or Staging(view.device)
            self._staging.copy(view, tensor)
        else:
            view.copy_(tensor)


class _Run:
    """One call: what it has checked, and what it has written."""

    def __init__(self, updater: Updater) -> None:
        self.updater, self.model = updater, updater.model
        self.update = Update()
        self.given: dict[str, Entry] = {}
        self.filled: dict[str, str] = {}
        self.planned: Counter[str] = Counter()
        self.halves: dict[str, dict[str, Tensor]] = {}
        self.writing = False

    def all(self, entries: Sequence[Entry], complete: bool, ready: Callable[[], None] = lambda: None) -> Update:
        """Check every tensor, say that they are `ready` to be written, then write them."""
        plans = [self._plan(entry) for entry in entries]
        lacking = sorted(self.updater.names - self._covered(set(self.given)))
        if complete and lacking:
            raise UpdateError(f"the checkpoint lacks {_listed(lacking)}, so it is not complete; nothing was changed")
        self._check_pairs()
        ready()
        return self._written((entry, plan) for entry, plan in zip(entries, plans, strict=True))

    def each(self, entries: Iterable[Entry]) -> Update:
        """Check and write tensor by tensor."""
        return self._written((entry, self._plan(entry)) for entry in entries)

    def _covered(self, names: set[str]) -> set[str]:
        return {cover for name in names for cover in self.updater.targets[name].covers}

    def _plan(self, entry: Entry) -> tuple[str, Target] | None:
        found = self.updater.find(entry.name)
        if isinstance(found, str):
            self.update.skipped[found] += 1
            return None
        name, target = found
        if tuple(entry.shape) != target.shape:
            raise UpdateError(f"{entry.name} has shape {tuple(entry.shape)}; the spec and config.json make it {target.shape}")
        allowed = (torch.uint8,) if target.packed else FLOATS
        if entry.dtype not in allowed:
            raise UpdateError(f"{entry.name} is {entry.dtype}, and must be one of {', '.join(map(str, allowed))}; dequantise it first")
        self._check_once(entry, name, target)
        self.planned[target.role] += 1
        return name, target

    def _check_once(self, entry: Entry, name: str, target: Target) -> None:
        """No two tensors of a call fill the same storage, but for a tied pair of equal values and the halves of one weight."""
        for cover in target.covers:
            other = self.filled.get(cover)
            if other is None:
                self.filled[cover] = name
                continue
            rival, earlier = self.updater.targets[other], self.given[other]
            if name not in self.given and rival.packed and target.packed:
                continue
            if name in self.given or not (rival.tied or target.tied):
                raise UpdateError(f"{entry.name} fills what {earlier.name} of the same call fills already: give each weight once")
            if not torch.equal(earlier.read().to(target.view), entry.read().to(target.view)):
                raise UpdateError(f"{entry.name} differs from {earlier.name} although config.json ties them")
        self.given[name] = entry

    def _written(self, plans: Iterable[tuple[Entry, tuple[str, Target] | None]]) -> Update:
        done = False
        try:
            for entry, plan in plans:
                self._write(entry, plan)
            self._check_pairs()
            self._finish()
            done = True
        finally:
            if self.writing and not done:
                self.model.missing_weights = set(self.updater.names)
                self.model.weights_written()
        return self.update

    def _write(self, entry: Entry, plan: tuple[str, Target] | None) -> None:
        if plan is None:
            return
        name, target = plan
        tensor = entry.read()
        if target.packed:
            halves = self.halves.setdefault(target.packed, {})
            halves[name.removeprefix(target.packed)] = tensor
            if len(halves) == 2:
                blocks, scales = (halves[half].to(target.view.device) for half in ("_blocks", "_scales"))
                self.writing = True
                self.updater.write(target, dequantise(blocks, scales, torch.bfloat16))
        else:
            self.writing = True
            self.updater.write(target, tensor)
        self.update.counts[target.role] += 1
        self.update.bytes += tensor.nbytes

    def _check_pairs(self) -> None:
        packed = Counter(target.packed for name in self.given if (target := self.updater.targets[name]).packed)
        if halves := sorted(name for name, count in packed.items() if name and count == 1):
            raise UpdateError(f"{_listed(halves)} came with one of _blocks and _scales; a call needs both")

    def _finish(self) -> None:
        if not self.update.counts:
            raise UpdateError("the update holds no weight of the model, so nothing was changed")
        if self.update.counts != self.planned:
            raise UpdateError(f"the update wrote {dict(self.update.counts)} tensors, and its names promised {dict(self.planned)}")
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)  # whose memory it was may free it now
        self.model.missing_weights -= self._covered(set(self.given))
        self.model.weights_written()
        self.update.version = self.model.weight_version


def _entry(item: Any) -> Entry:
    try:
        name, tensor = item
    except (TypeError, ValueError):
        raise UpdateError(f"an update is a directory or pairs of name and tensor; got {type(item).__name__}") from None
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        raise UpdateError(f"an update is pairs of name and tensor; got {type(name).__name__} and {type(tensor).__name__}")
    if problem := unreadable(tensor):
        raise UpdateError(f"{name} {problem}")
    return Entry(name, tuple(tensor.shape), tensor.dtype, tensor.detach)


def unreadable(tensor: Tensor) -> str | None:
    """Why a tensor's numbers are not all here, or None where they are."""
    if tensor.is_meta:
        return "is on the meta device and has no numbers; materialise the model first"
    if hasattr(tensor, "full_tensor"):
        return "is a shard of a distributed tensor; gather it with full_tensor() first"
    if hasattr(tensor, "_sharded_size") or type(tensor).__name__ == "FlatParameter":
        return "is a flat parameter of FSDP; gather it with summon_full_params first"
    return None


def distinct(weights: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Pairs to be sent, a tied pair once, under the name that comes first. Raises UpdateError for what has no numbers here."""
    given: dict[tuple[Any, ...], tuple[str, Tensor]] = {}
    for name, tensor in weights:
        if problem := unreadable(tensor):
            raise UpdateError(f"{name} {problem}")
        given.setdefault((tensor.data_ptr(), tensor.device, tuple(tensor.shape), tensor.stride(), tensor.dtype), (name, tensor))
    return list(given.values())


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def incomplete(missing: Iterable[str]) -> str:
    """What to say of a model that holds a mixture of old and new weights."""
    return (
        f"an update of the weights failed half-way, and they are a mixture until these have come: "
        f"{_listed(sorted(missing))}. Give load_weights a complete set, or a checkpoint's directory"
    )
