"""Adapters as they come, a PEFT directory, a live PeftModel or tensors with a config, read as updates of a model's weights.

Everything about an adapter is checked here, before anything of the engine changes: what its config promises against what it
holds, ranks, shapes, numbers that are none.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from flexgen.contract.weights import Weight
from flexgen.runtime.loading.adapter_config import LoraSettings
from flexgen.runtime.loading.lora import AdapterError, ExpertLowRank, LowRank
from flexgen.runtime.loading.model import Model
from flexgen.runtime.loading.updates import unreadable

Place = tuple[int | None, str]
"""A layer's index, None outside of layers, and a module's or parameter's name below it."""

Update = LowRank | ExpertLowRank

_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<part>[AB])(?:\.(?P<adapter>(?!weight$)[^.]+))?(?:\.weight)?")


@dataclass(frozen=True)
class Adapter:
    """The low-rank updates of each place; they add up.

    promised  modules by role that spec and config predict, which a merge must have changed
    skipped   modules by pattern of the spec's `skip`: parts that text does not pass
    """

    name: str
    updates: Mapping[Place, Sequence[Update]]
    promised: Mapping[str, int]
    skipped: Mapping[str, int]


@dataclass(frozen=True)
class Module:
    """What an adapter may change: the weights that hold it, its (out, in), and for stacked experts how many they are."""

    roles: tuple[Weight, ...]
    shape: tuple[int, int]
    experts: int = 0


@dataclass(frozen=True)
class Pair:
    """A and B of one module as they lie in a file or a live model; `depth` counts the wrappers around this one's inside."""

    module: str
    a: Tensor
    b: Tensor
    embedding: bool
    scale: float | None = None
    parameter: str | None = None
    depth: int = 0


class Reader:
    """Reads adapters of one model, on to its device, or with `move=False` where their tensors are. Knows every module that its
    spec has.
    """

    def __init__(self, model: Model, move: bool = True) -> None:
        walker = model.package.walker
        self.model, self.device = model, model.device if move else None
        self.prefixes: list[str] = sorted(walker.PREFIXES, key=len, reverse=True)
        self.layer = re.compile(walker.LAYER.replace(".", r"\.").replace("*", r"(\d+)") + r"\.(.+)")
        self.modules: dict[Place, Module] = {}
        for index, kind in [(None, "model"), *enumerate(model.dims.kinds)]:
            for weight in model.table(kind):
                if weight.role in model.package.merge.MERGES and weight.present:
                    for name, shape, experts in _modules(weight):
                        old = self.modules.get((index, name))
                        self.modules[index, name] = Module((*(old.roles if old else ()), weight), shape, experts)
        self.whole = [place for place in self.modules if not self._of_one_expert(place)]
        self.parameters: dict[Place, list[Place]] = {}
        for index, name in self.whole:
            if self.modules[index, name].experts:
                self.parameters.setdefault((index, name.rpartition(".")[0]), []).append((index, name))

    def read(self, source: Any, name: str | None = None, config: Any = None) -> Adapter:
        """An adapter from a directory, a PeftModel, or a mapping of tensors with its config. Raises AdapterError."""
        if isinstance(source, str | os.PathLike):
            directory = Path(source).expanduser()
            name = name or directory.resolve().name
            fields, tensors = _on_disk(directory)
            return self._of_tensors(name, fields, tensors)
        if isinstance(source, Mapping):
            if config is None:
                raise AdapterError("an adapter's tensors say neither scale nor targets: give its LoraConfig too, as config=")
            return self._of_tensors(name or "adapter", _fields(config), source)
        if hasattr(source, "peft_config") and hasattr(source, "named_modules"):
            return self._live(source, name)
        raise AdapterError(f"an adapter is a directory, a PeftModel, or tensors with a config; got {type(source).__name__}")

    def place(self, full: str) -> Place:
        """Where a module is, by the name that the trainer's model or a file gives it."""
        while full.startswith("base_model.model."):
            full = full.removeprefix("base_model.model.")
        prefix = next((prefix for prefix in self.prefixes if full.startswith(f"{prefix}.")), None)
        short = full if prefix is None else full.removeprefix(f"{prefix}.")
        found = self.layer.fullmatch(short)
        return (None, short) if found is None else (int(found[1]), found[2])

    def _of_tensors(self, name: str, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Adapter:
        settings = LoraSettings.read(fields, name)
        updates: dict[Place, list[Update]] = {}
        skipped: Counter[str] = Counter()
        for pair in self._paired(name, tensors):
            place = self._target(name, pair, settings)
            if isinstance(place, str):
                skipped[place] += 1
                continue
            full, count = self._names(place)[0], max(self.modules[place].experts, 1)
            if pair.a.shape[0] != settings.rank_of(full) * count:
                raise AdapterError(
                    f"adapter {name}: {pair.module} has rank {pair.a.shape[0] / count:g}, and its config says {settings.rank_of(full)}"
                )
            updates[place] = [self._update(name, pair, place, settings.scale_of(full))]
        self._check_promise(name, settings, updates)
        return self._adapter(name, updates, skipped)

    def _paired(self, name: str, tensors: Mapping[str, Tensor]) -> list[Pair]:
        halves: dict[tuple[str, bool], dict[str, Tensor]] = {}
        adapters = set()
        for key, tensor in tensors.items():
            found = _KEY.fullmatch(key)
            if found is None:
                self._check_base(name, key, tensor)
                continue
            adapters.add(found["adapter"])
            halves.setdefault((found["module"], bool(found["embedding"])), {})[found["part"]] = tensor
        if len(adapters) > 1:
            raise AdapterError(f"adapter {name}: the tensors are those of several adapters, {sorted(map(str, adapters))}; give one")
        for (module, _), parts in halves.items():
            if len(parts) == 1:
                raise AdapterError(f"adapter {name}: {module} has lora_{next(iter(parts))} and lacks the other of lora_A and lora_B")
        return [
            Pair(re.sub(r"(\.base_layer)+$", "", module), parts["A"], parts["B"], embedding, depth=module.count(".base_layer"))
            for (module, embedding), parts in halves.items()
        ]

    def _check_base(self, name: str, key: str, tensor: Tensor) -> None:
        """PEFT saves an embedding beside an adapter of it: it may come if it is the base's own."""
        place = self.place(key.replace(".base_layer", "").removesuffix(".weight"))
        module = self.modules.get(place)
        if module is not None and not module.experts and len(module.roles[0].parts) == 1 and place[0] is None:
            stored = self.model.stored(self.model.weights, module.roles[0])
            if tensor.shape == stored.shape and torch.equal(tensor.to(stored), stored):
                return
        raise AdapterError(
            f"adapter {name} holds {key}, which is no lora_A or lora_B and not the base's own tensor: trained whole modules are "
            "weights, give them to load_weights"
        )

    def _target(self, name: str, pair: Pair, settings: LoraSettings) -> Place | str:
        """The place that a pair updates, or the pattern that skips it.

        Of nested parameters of a module the first declared lies innermost.
        """
        index, module = self.place(pair.module)
        if (index, module) in self.modules:
            return index, module
        parameters = [
            place for place in self.parameters.get((index, module), ())
            if settings.promises(index, self._names(place), parameter=True)
        ]  # fmt: skip
        if pair.depth < len(parameters):
            return parameters[len(parameters) - 1 - pair.depth]
        return self._skipping(name, pair.module)

    def _skipping(self, name: str, module: str) -> str:
        """The pattern of the spec's `skip` that a module falls under. Raises AdapterError where none does."""
        index, below = self.place(module)
        full = (*self._names((index, below)), module.removeprefix("base_model.model."))
        for pattern in self.model.package.walker.SKIP:
            if any(fnmatch.fnmatchcase(f"{each}.weight", pattern) for each in full):
                return pattern
        raise AdapterError(
            f"adapter {name} changes {module}, which is no module of {self.model.package.folder.name} that adapters reach: "
            "it was trained on another base, or on a part (a router, a norm) that is not served"
        )

    def _update(self, name: str, pair: Pair, place: Place, scale: float) -> Update:
        module = self.modules[place]
        for part, tensor in (("lora_A", pair.a), ("lora_B", pair.b)):
            if problem := unreadable(tensor):
                raise AdapterError(f"adapter {name}: {pair.module}.{part} {problem}")
        a, b = (tensor.detach().to(self.device or pair.a.device) for tensor in (pair.a, pair.b))
        if pair.embedding:
            a, b = b.T, a.T
        try:
            update = ExpertLowRank(a, b, scale, module.experts) if module.experts else LowRank(a, b, scale)
        except AdapterError as error:
            raise AdapterError(f"adapter {name}: {pair.module}: {error}") from None
        if update.shape[-2:] != module.shape:
            raise AdapterError(
                f"adapter {name}: the update of {pair.module} is {update.shape[-2:]}, and the weight of this model is "
                f"{module.shape}: it was trained on another base"
            )
        return update

    def _names(self, place: Place) -> list[str]:
        """The full names that a module may have in a trainer's model, the likeliest first."""
        index, name = place
        walker = self.model.package.walker
        short = name if index is None else f"{walker.LAYER.replace('*', str(index))}.{name}"
        return [*(f"{prefix}.{short}" for prefix in walker.PREFIXES), short]

    def _check_promise(self, name: str, settings: LoraSettings, updates: Collection[Place]) -> None:
        """An adapter holds an update of every module that its config names, and of no other."""
        single = any(self._of_one_expert(place) for place in updates)
        promised = {
            place for place in (self.modules if single else self.whole)
            if settings.promises(place[0], self._names(place), bool(self.modules[place].experts))
        }  # fmt: skip
        for places, what in ((promised - set(updates), "lacks"), (set(updates) - promised, "holds, and its config does not name,")):
            if places:
                listed = sorted(self._names(place)[-1] for place in places)
                more = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
                raise AdapterError(f"adapter {name} {what} {', '.join(listed[:5])}{more}")

    def _of_one_expert(self, place: Place) -> bool:
        module = self.modules[place]
        return not module.experts and module.roles[0].kind == "experts"

    def _live(self, peft: Any, wanted: str | None) -> Adapter:
        """The active adapters of a PeftModel, or the one called `wanted`; their updates of a module add up."""
        active = peft.active_adapters() if callable(peft.active_adapters) else peft.active_adapters
        names = [wanted] if wanted is not None else list(active)
        updates: dict[Place, list[Update]] = {}
        skipped: Counter[str] = Counter()
        for name in names:
            if name not in peft.peft_config:
                raise AdapterError(f"the PeftModel has no adapter {name!r}; it has {sorted(peft.peft_config)}")
            settings = LoraSettings.read(_fields(peft.peft_config[name]), name)
            found = dict(self._live_updates(peft, name, skipped))
            self._check_promise(name, settings, found)
            for place, update in found.items():
                updates.setdefault(place, []).append(update)
        return self._adapter("+".join(names), updates, skipped)

    def _live_updates(self, peft: Any, name: str, skipped: Counter[str]) -> Iterator[tuple[Place, Update]]:
        for pair in _live_pairs(peft, name):
            index, module = self.place(pair.module)
            place = (index, module if pair.parameter is None else f"{module}.{pair.parameter}")
            if place in self.modules:
                assert pair.scale is not None
                yield place, self._update(name, pair, place, pair.scale)
            else:
                skipped[self._skipping(name, f"{pair.module}{'.' + pair.parameter if pair.parameter else ''}")] += 1

    def _adapter(self, name: str, updates: Mapping[Place, Sequence[Update]], skipped: Mapping[str, int]) -> Adapter:
        if not updates:
            raise AdapterError(f"adapter {name} changes no module of {self.model.package.folder.name}; nothing was changed")
        check_numbers(name, [(self._names(place)[-1], each) for place, listed in updates.items() for each in listed])
        promised = Counter(weight.role for place in updates for weight in self.modules[place].roles)
        return Adapter(name, updates, promised, skipped)


def _modules(weight: Weight) -> Iterator[tuple[str, tuple[int, int], int]]:
    """Names of a weight's modules with their (out, in) as PEFT multiplies them, and how many experts one holds."""
    if weight.kind != "experts":
        for name, part in zip(weight.modules, weight.parts, strict=True):
            yield name, (part.rows, weight.shape[1]), 0
        return
    stacked, *single = weight.modules
    count, first, second = weight.shape
    out, into = (second, first) if weight.transposed else (first, second)
    yield stacked, (out, into), count
    for name in single:
        for expert in range(count):
            yield name.replace("*", str(expert)), (out // len(single), into), 0


def _live_pairs(peft: Any, name: str) -> Iterator[Pair]:
    for path, module in peft.named_modules():
        held = getattr(module, "lora_A", None)
        embedded = getattr(module, "lora_embedding_A", None)
        embedding = embedded is not None and name in embedded
        if not (held is not None and name in held) and not embedding:
            continue
        if getattr(module, "merged_adapters", None):
            raise AdapterError(f"{path} is merged in the trainer, and its base weight is changed: call unmerge_adapter() first")
        if getattr(module, "disable_adapters", False):
            raise AdapterError(f"{path}: the trainer's adapters are disabled; enable them before they are read")
        a, b = (
            (module.lora_embedding_A[name], module.lora_embedding_B[name])
            if embedding
            else (module.lora_A[name].weight, module.lora_B[name].weight)
        )
        plain = path.replace(".base_layer", "")
        yield Pair(plain, a, b, embedding, float(module.scaling[name]), getattr(module, "parameter_name", None))


def check_numbers(name: str, updates: Iterable[tuple[str, Update]]) -> None:
    """Raises AdapterError for numbers that are none, in a few launches, and waits for the device once."""
    listed = list(updates)
    with torch.no_grad():
        sums = torch._foreach_norm([tensor for _, update in listed for tensor in (update.a, update.b)], 1, dtype=torch.float32)
        fine = torch.stack([each.to(sums[0].device) for each in sums]).isfinite().tolist()
    if not all(fine):
        worst = listed[fine.index(False) // 2][0]
        raise AdapterError(f"adapter {name}: {worst} holds NaN or infinity; nothing was changed")


def _on_disk(directory: Path) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
    path = directory / "adapter_config.json"
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise AdapterError(f"{path} cannot be read: {error}; an adapter is a directory that PEFT's save_pretrained wrote") from None
    if not isinstance(fields, dict):
        raise AdapterError(f"{path} is no JSON object")
    file = directory / "adapter_model.safetensors"
    try:
        return fields, load_file(file)
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{file} cannot be read: {error}; save the adapter with safe_serialization=True") from None


def _fields(config: Any) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    to_dict: Callable[[], dict[str, Any]] | None = getattr(config, "to_dict", None)
    if to_dict is None:
        raise AdapterError(f"config is {type(config).__name__}, and must be a LoraConfig or its fields")
    return to_dict()
