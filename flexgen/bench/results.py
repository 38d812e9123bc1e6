"""One measured figure, and the JSON file that keeps it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


@dataclass(frozen=True)
class Result:
    """tokens_per_second counts generated tokens over the whole call, the median of `repeats`; bytes are of device memory.

    bound_tokens_per_second and experts_touched (distinct experts of a layer in a step, on average) are of the decode
    steps at their mean length. None: not known for this engine.
    """

    engine: str
    model: str
    workload: str
    batch: int
    repeats: int
    tokens_per_second: float
    bound_tokens_per_second: float | None
    experts_touched: float | None
    peak_bytes: int
    weight_bytes: int
    kv_bytes: int | None
    startup_seconds: dict[str, float]
    uncaptured: list[str]
    device: str
    versions: dict[str, str]
    commit: str
    command: str

    @property
    def name(self) -> str:
        """What the file is called."""
        return file_name(self.engine, self.model, self.workload, self.batch)

    def save(self, folder: Path) -> Path:
        """Write it, in place of an earlier one."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / self.name
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")
        return path


def file_name(engine: str, model: str, workload: str, batch: int) -> str:
    return f"{workload}-{model}-{batch}-{engine}.json"


def labelled(model: str, layers: int | None) -> str:
    """What figures call a model of which the first `layers` are measured."""
    return model if layers is None else f"{model}-{layers}-layers"


def spare_other_devices(paths: Iterable[Path], device: str) -> None:
    """Raise ValueError, before anything is measured, where a figure of another device would be replaced."""
    for path in paths:
        if path.exists() and (measured := _load(path).device) != device:
            raise ValueError(f"{path} holds a figure of {measured}, and this machine's are of {device}: give another --out")


def load_results(folder: Path) -> list[Result]:
    """Every figure in a folder, in order of its file name. Raises ValueError naming a file that holds none."""
    return [_load(path) for path in sorted(folder.glob("*.json"))]


def _load(path: Path) -> Result:
    try:
        return Result(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is no measured figure: {error}; delete it, or measure it again") from None


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in ("torch", "triton", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def commit() -> str:
    """The commit of the working tree; outside a repository FLEXGEN_COMMIT, or `unknown`."""
    if given := os.environ.get("FLEXGEN_COMMIT"):
        return given
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
