"""A generated package bound to one checkpoint: sizes, storage, layers and the walker that runs them.

`LLM` loads one and gives it to an engine, which knows it as a `ServedModel`.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexgen.contract.abi import Layer, Step
from flexgen.contract.configs import normalise
from flexgen.contract.json_files import shown
from flexgen.contract.state import Slots, State
from flexgen.contract.weights import Weight, below
from flexgen.errors import ConfigError
from flexgen.runtime.loading.checkpoint import Checkpoint, LoadReport, check_tied, fill
from flexgen.runtime.loading.checks import check_memory, check_sizes, check_state
from flexgen.runtime.loading.config import check_ignored, check_packed, overridden, read_config
from flexgen.runtime.loading.package import Package, choose, load_package
from flexgen.runtime.ops.lora import Adapted
from flexgen.runtime.transfer import Staging

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOAD_FORMATS = ("auto", "safetensors", "dummy")


class Model:
    """One copy of the weights, laid out as transformers lays them out, and the walker that reads them.

    layers    one `Layer` a layer; K/V pools and state are bound to them by whoever owns those
    load_seconds  how long `load` took
    missing_weights  tensors without which an update that failed half-way leaves a mixture
    mixers    per layer, the entries that keep state; `state` says what each keeps
    routers   per layer, where each router leaves a token's experts on request, and how many it chooses
    pristine  by layer and role, the weight itself where the layer reads another tensor that is made of it
    follow    makes anew, after every update, what others made of the weights
    """

    def __init__(
        self, package: Package, dims: Any, config: dict[str, Any], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.package = package
        self.dims = dims
        self.config = config
        self.dtype = dtype
        self.device = device
        self.directory: Path | None = None
        self.report: LoadReport | None = None
        self.load_seconds = 0.0
        self._weight_version = 0
        self.missing_weights: set[str] = set()
        self.head_dtype: torch.dtype | None = None
        self._stored_head: Tensor | None = None
        self.pristine: dict[tuple[Layer, str], Tensor] = {}
        self.follow: Callable[[], object] | None = None
        self.state: dict[str, State] = package.attention.state(dims)
        self.mixers: list[tuple[str, ...]] = [package.walker.MIXERS[kind] for kind in dims.kinds]
        self._tables = {kind: self._rows(kind) for kind in ("model", *dict.fromkeys(dims.kinds))}
        check_state(self.mixers, self.state)
        for kind, table in self._tables.items():
            check_sizes(kind, table, _routes(table))
        check_memory([self.table(kind) for kind in ("model", *dims.kinds)], dtype, device)
        self.weights = self._allocate("model")
        self.layers = [self._allocate(kind) for kind in dims.kinds]
        self.routers: list[dict[str, int]] = [_routes(self.table(kind)) for kind in dims.kinds]
        for layer, names in zip(self.layers, self.routers, strict=True):
            layer.__dict__.update(dict.fromkeys(names))
        run = [package.walker.LAYERS[kind] for kind in dims.kinds]
        self.walker = package.walker.Walker(dims, self.weights, self.layers, run)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        spec: str | None = None,
        generated: str | Path | None = None,
        load_format: str = "auto",
        ignore_config: Sequence[str] = (),
        allow_edited: bool = False,
        head_dtype: str | torch.dtype | None = None,
        mamba_ssm_cache_dtype: str = "auto",
        hf_overrides: Mapping[str, Any] | None = None,
    ) -> Model:
        """Load a Hugging Face directory. `load_format="dummy"` needs config.json alone and draws random weights.

        `head_dtype="float32"` keeps a second copy of the head in fp32, for logits that are not rounded to the model's dtype.
        `mamba_ssm_cache_dtype` is that of recurrent state, where it is not the model's own; `auto` is what the spec says.

        `hf_overrides` are fields in place of config.json's; nested ones are merged.

        A package, shipped or `generated`, is code that runs here; `allow_edited` runs one that was edited by hand too.

        Raises ConfigError, CheckpointError or PackageError for what does not fit.
        """
        started = time.perf_counter()
        if load_format not in LOAD_FORMATS:
            raise ValueError(f"load_format is {shown(load_format)}, and must be one of {', '.join(LOAD_FORMATS)}")
        directory = Path(path).expanduser()
        raw = overridden(read_config(directory), hf_overrides)
        package = load_package(choose(raw, spec, generated), allow_edited)
        config = normalise(raw, package.manifest["text_config"])
        dims = _dims(package, config, ignore_config)
        where = _device(device)
        model = cls(package, dims, config, _dtype(dtype, config, raw), where)
        model.directory = directory
        if mamba_ssm_cache_dtype != "auto":
            model.set_state_dtype(_dtype(mamba_ssm_cache_dtype, config, raw, "mamba_ssm_cache_dtype"))
        if load_format == "dummy":
            model._fill_random()
        else:
            model.report = model._fill(Checkpoint(directory, package.walker.PREFIXES, package.walker.SKIP, package.walker.LAYER))
        if head_dtype is not None:
            model.set_head_dtype(_dtype(head_dtype, config, raw, "head_dtype"))
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        model.load_seconds = time.perf_counter() - started
        return model

    def table(self, kind: str) -> list[Weight]:
        """The weights of a layer kind, or of the "model" itself, under the checkpoint's names."""
        return self._tables[kind]

    def _rows(self, kind: str) -> list[Weight]:
        walker = self.package.walker
        rows = [weight for table in walker.WEIGHTS[kind] for weight in table(self.dims)]
        return rows if kind == "model" else [below(walker.LAYER, weight) for weight in rows]

    @torch.no_grad()
    def _allocate(self, kind: str) -> Layer:
        tensors: dict[str, Tensor | None] = {}
        for weight in self.table(kind):
            if not weight.present:
                tensors[weight.role] = None
            elif weight.same_as is not None:
                tensors[weight.role] = tensors[weight.same_as]
            else:
                dtype = torch.float32 if weight.fp32 else self.dtype
                tensors[weight.role] = torch.empty(weight.shape, dtype=dtype, device=self.device)
        return Layer(**tensors)

    def storages(self) -> Iterator[tuple[Layer, Weight, int | None]]:
        """Every weight that has storage of its own: its layer object, its row of the table, its layer's index."""
        for weight in self.table("model"):
            if weight.present and weight.same_as is None:
                yield self.weights, weight, None
        for index, (layer, kind) in enumerate(zip(self.layers, self.dims.kinds, strict=True)):
            for weight in self.table(kind):
                if weight.present:
                    yield layer, weight, index

    def stored(self, layer: Layer, weight: Weight) -> Tensor:
        """A weight as updates write it, which for the head need not be what is multiplied."""
        if self._stored_head is not None and layer is self.weights and weight.kind == "head":
            return self._stored_head
        owner = weight.same_as or weight.role  # a tied head that an adapter unties reads a tensor of its own
        return self.pristine.get((layer, owner), self.read(layer, owner))

    def read(self, layer: Layer, role: str) -> Tensor:
        """The tensor that a layer multiplies."""
        weight = getattr(layer, role)
        return weight.weight if isinstance(weight, Adapted) else weight

    @torch.no_grad()
    def shadow(self, layer: Layer, weight: Weight) -> None:
        """Let the layer read a copy of a weight, which a merge may then change. A graph that was captured reads the old one."""
        if (layer, weight.role) in self.pristine or (weight.kind == "head" and self._stored_head is not None):
            return
        stored, held = self.read(layer, weight.role), getattr(layer, weight.role)
        copied = torch.empty_like(stored).copy_(stored)
        if isinstance(held, Adapted):
            held.weight = copied
        else:
            setattr(layer, weight.role, copied)
        self.pristine[layer, weight.role] = stored

    @property
    def shadow_bytes(self) -> int:
        """Bytes of the copies that layers read in place of a weight."""
        return sum(self.read(layer, role).nbytes for layer, role in self.pristine)

    def weight_bytes(self) -> tuple[int, int]:
        """Bytes of the weights, each storage once, and of what is derived of them."""
        stored = sum(self.stored(layer, weight).nbytes for layer, weight, _ in self.storages())
        heads = [self.read(self.weights, weight.role) for weight in self.table("model") if weight.kind == "head"]
        derived = 0 if self._stored_head is None else sum(head.nbytes for head in heads)
        return stored, derived

    @torch.no_grad()
    def weights_written(self) -> None:
        """After every change of the weights in place: derive again what is made of them, and raise the version."""
        self.weight_version += 1

    def _fill(self, checkpoint: Checkpoint) -> LoadReport:
        staging = Staging(self.device)
        for layer, weight, index in self.storages():
            fill(getattr(layer, weight.role), weight, index, checkpoint, staging)
        for weight in self.table("model"):
            if weight.same_as is not None:
                check_tied(getattr(self.weights, weight.role), weight, checkpoint)
        return checkpoint.finish()

    @torch.no_grad()
    def _fill_random(self) -> None:
        """Weights that route like a model: gains 1, matrices N(0, 0.02), routers N(0, 1); the same on every run."""
        generator = torch.Generator(self.device)
        for layer, weight, index in self.storages():
            storage = getattr(layer, weight.role)
            generator.manual_seed(zlib.crc32(f"{weight.role}.{index}".encode()))
            if weight.kind == "bias":
                storage.zero_()
            elif weight.kind == "vector":
                storage.fill_(1.0)
            else:
                storage.normal_(0.0, 1.0 if weight.kind == "router" else 0.02, generator=generator)

    @property
    def weight_version(self) -> int:
        """Whoever changes weights in place adds 1 when done: what was derived from the old ones is then made anew."""
        return self._weight_version

    @weight_version.setter
    def weight_version(self, version: int) -> None:
        self._weight_version = version
        if self._stored_head is not None:  # what is multiplied is a copy of another dtype
            (head,) = (weight.role for weight in self.table("model") if weight.kind == "head")
            with torch.no_grad():
                self.read(self.weights, head).copy_(self._stored_head)
        if self.follow is not None:
            self.follow()

    def make_rope_tables(self, length: int) -> None:
        """Rotary tables for positions below `length`, shared by all layers of an entry."""
        tables = self.package.attention.rope_tables(self.dims, length, self.dtype, self.device)
        for layer, mixers in zip(self.layers, self.mixers, strict=True):
            for entry in mixers:
                if entry in tables:
                    layer.rope_cos, layer.rope_sin = tables[entry]

    @torch.no_grad()
    def forward(self, ids_T: Tensor, step: Step) -> Tensor:
        """Token ids (T,) -> hidden states (T, D) after the final norm; writes K/V pages and state."""
        return self.walker.forward(ids_T, step)

    @torch.no_grad()
    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Hidden states (R, D) -> logits (R, V) in the head's dtype, which is the model's unless `head_dtype` says else."""
        return self.walker.logits(hidden_RD if self.head_dtype is None else hidden_RD.to(self.head_dtype))

    @torch.no_grad()
    def set_head_dtype(self, dtype: torch.dtype, keep: bool = False) -> None:
        """Derive a head of another dtype from the stored one, which stays where it is an embedding too, or with `keep`."""
        if dtype == self.dtype:
            return
        (head,) = (weight.role for weight in self.table("model") if weight.kind == "head")
        stored = getattr(self.weights, head)
        if keep or any(weight.role == head and weight.same_as for weight in self.table("model")):
            self._stored_head = stored
        setattr(self.weights, head, stored.to(dtype))
        self.head_dtype = dtype

    def set_state_dtype(self, dtype: torch.dtype) -> None:
        """Keep recurrent state in `dtype` where the spec gives it one that is not the model's. Before any engine is made."""
        slots = {name: kept.tensors for name, kept in self.state.items() if isinstance(kept, Slots)}
        if not any(own for tensors in slots.values() for _, own in tensors.values()):
            raise ValueError(f"mamba_ssm_cache_dtype={str(dtype).removeprefix('torch.')}: this model keeps no such state")
        for name, tensors in slots.items():
            self.state[name] = Slots({key: (shape, own and dtype) for key, (shape, own) in tensors.items()})


def _routes(table: Sequence[Weight]) -> dict[str, int]:
    """Where the routers of a layer leave each token's experts on request, and how many they choose."""
    return dict(weight.routes for weight in table if weight.routes is not None)


def _dims(package: Package, config: dict[str, Any], ignore_config: Sequence[str]) -> Any:
    """The numbers of a checkpoint, `ignore_config` being fields that its caller lets pass unread."""
    check_ignored(config, ignore_config)
    if "quantization_config" in package.walker.IGNORE and "quantization_config" not in ignore_config:
        check_packed(config)
    return package.walker.Dims.from_config(config, tuple(ignore_config))


def _device(wanted: str | torch.device | None) -> torch.device:
    """The device asked for; a CUDA one if there is any, else the host, where none is."""
    try:
        device = torch.device(wanted if wanted is not None else "cuda" if torch.cuda.is_available() else "cpu")
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, ValueError, OverflowError, AssertionError) as error:  # the last from a torch without CUDA
        raise ValueError(f"device is {shown(wanted)}, which torch cannot use here: {str(error).splitlines()[0][:200]}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {shown(wanted)}, and must be cpu or cuda")
    return device


def _dtype(
    wanted: str | torch.dtype, config: dict[str, Any], raw: dict[str, Any], what: str = "dtype"
) -> torch.dtype:
    """The dtype asked for; `auto` takes config.json's, and fp32 where it has none. vLLM's `half` and `float` are taken."""
    wanted = {"half": "float16", "float": "float32"}.get(wanted, wanted) if isinstance(wanted, str) else wanted
    listed = ", ".join(DTYPES)
    if not isinstance(wanted, str | torch.dtype):
        raise ValueError(f"{what} is {shown(wanted)}, and must be auto or one of {listed}")
    if wanted == "auto":
        name = next((c[key] for c in (config, raw) for key in ("dtype", "torch_dtype") if c.get(key)), "float32")
        if not isinstance(name, str) or name not in DTYPES:
            raise ConfigError(f"config.json's dtype is {shown(name)}, and must be one of {listed}; or pass dtype=")
        return DTYPES[name]
    if isinstance(wanted, torch.dtype) and wanted in DTYPES.values():
        return wanted
    if wanted not in DTYPES:
        raise ValueError(f"{what} is {shown(wanted)}, and must be auto or one of {listed}")
    return DTYPES[wanted]
