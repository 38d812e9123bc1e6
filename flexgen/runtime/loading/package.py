"""Finds the generated package that serves a checkpoint, and loads it from its folder."""

from __future__ import annotations

import hashlib
import importlib
import sys
import types
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flexgen.contract.abi import ABI
from flexgen.contract.configs import broken_fence, merged, normalise
from flexgen.contract.json_files import read_object, shown
from flexgen.errors import ConfigError, FlexgenError
from flexgen.project import projects

_KEYS: Mapping[str, Any] = MappingProxyType(
    {
        "abi": int, "defaults": dict, "files": dict, "model_types": list, "name": str, "require": dict, "source": str,
        "text_config": str | None,
    }
)
"""What a manifest must say for a package to be chosen and loaded."""


class PackageError(FlexgenError):
    """A generated package that is missing, broken or of another ABI."""


@dataclass(frozen=True)
class Package:
    """A loaded package: its manifest and its three modules."""

    folder: Path
    manifest: Mapping[str, Any]
    walker: types.ModuleType
    attention: types.ModuleType
    merge: types.ModuleType


def find_packages(folder: Path | None = None) -> dict[str, Path]:
    """The generated packages below a folder by name; where none is given, flexgen's own and the project's, which come first."""
    bases = [project.generated for project in projects()] if folder is None else [folder]
    found: dict[str, Path] = {}
    for base in bases:
        for path in sorted(base.glob("*/manifest.json")):
            found.setdefault(path.parent.name, path.parent)
    return found


def choose(raw: Mapping[str, Any], spec: str | None = None, generated: str | Path | None = None) -> Path:
    """The folder of the one package whose model types and fences hold for a raw config.json.

    `generated` is a package's folder, or a folder of packages; `spec` names one of them, by name or by its spec's file.
    Of several that fit, one of the project's own is taken. Raises ConfigError listing each candidate with the field that
    ruled it out.
    """
    base = Path(generated) if generated is not None else None
    if base is not None and (base / "manifest.json").exists():
        return base
    packages = find_packages(base)
    if not packages:
        raise ConfigError(f"{base or projects()[0].generated} holds no generated packages: run `flexgen build`")
    if spec is not None:
        return _of_spec(spec, packages)
    reasons = {name: _ruled_out(folder, raw) for name, folder in packages.items()}
    fitting = [name for name, reason in reasons.items() if reason is None]
    if base is None and len(mine := [name for name in fitting if packages[name].parent == projects()[0].generated]) == 1:
        fitting = mine
    if len(fitting) == 1:
        return packages[fitting[0]]
    if fitting:
        raise ConfigError(
            f"several specs describe this checkpoint (model_type {shown(raw.get('model_type'))}), and no `require` of theirs rules it out: "
            f"{', '.join(fitting)}; choose one with spec=NAME, or --spec NAME on the command line"
        )
    listed = "".join(f"\n  {name}: {reason}" for name, reason in reasons.items())
    raise ConfigError(f"no spec describes this checkpoint (model_type {shown(raw.get('model_type'))}):{listed}")


def _of_spec(spec: str, packages: Mapping[str, Path]) -> Path:
    """The package of a spec's name, or of its file: the one that says it was made from a file of that name."""
    if spec in packages:
        return packages[spec]
    if (file := Path(spec)).suffix == ".yaml":
        for folder in packages.values():
            if Path(read_manifest(folder)["source"]).name == file.name:
                return folder
    raise ConfigError(f"no generated package {shown(spec)}: run `flexgen build SPEC`; there are {', '.join(packages)}")


def _ruled_out(folder: Path, raw: Mapping[str, Any]) -> str | None:
    """Why a package does not serve a raw config.json, or None where it does."""
    try:
        manifest = read_manifest(folder)
    except PackageError as error:
        return str(error)
    config = normalise(raw, manifest["text_config"])
    if config.get("model_type") not in manifest["model_types"]:
        return f"serves model_type {', '.join(manifest['model_types'])}"
    return broken_fence(merged(config, manifest["defaults"]), manifest["require"])


def read_manifest(folder: Path) -> Mapping[str, Any]:
    """A package's manifest. Raises PackageError where it is missing, broken, or of another ABI."""
    path = folder / "manifest.json"
    try:
        manifest = read_object(path, error=PackageError)
    except PackageError as error:
        raise PackageError(f"{error}: no manifest of a generated package; run `flexgen build`") from None
    if lacking := _KEYS.keys() - manifest.keys():
        raise PackageError(f"{path} is no manifest: it lacks {', '.join(sorted(lacking))}; run `flexgen build`")
    if wrong := sorted(key for key, kind in _KEYS.items() if not isinstance(manifest[key], kind)):
        raise PackageError(f"{path} is no manifest: its {', '.join(wrong)} are of another kind; run `flexgen build`")
    if unlisted := {"walker.py", "attention.py", "merge.py"} - manifest["files"].keys():
        raise PackageError(f"{path} is no manifest: its files lack {', '.join(sorted(unlisted))}; run `flexgen build`")
    if manifest["abi"] != ABI:
        fix = f"flexgen build {manifest['source']}"
        raise PackageError(f"{folder} has ABI {manifest['abi']}, and this runtime has {ABI}: run `{fix}`")
    return manifest


def load_package(folder: Path, allow_edited: bool = False) -> Package:
    """Import a package from its folder: code that is trusted. Refuses one that was edited by hand, or warns where that is allowed.

    The module name is made of the path and what the files hold, so a package built anew is not taken for the old one.
    """
    folder = folder.resolve()
    manifest = read_manifest(folder)
    hashes = {name: _hash(folder / name) for name in manifest["files"]}
    edited = [str(folder / name) for name, digest in manifest["files"].items() if hashes[name] != digest]
    if edited and not allow_edited:
        raise PackageError(
            f"edited by hand since it was generated: {', '.join(edited)}; run `flexgen build {manifest['source']}` to undo that, or "
            "pass allow_edited=True to run it as it is"
        )
    if edited:
        warnings.warn(f"edited by hand since it was generated: {', '.join(edited)}", stacklevel=2)
    identity = hashlib.sha256(repr((str(folder), sorted(hashes.items()))).encode()).hexdigest()
    name = f"flexgen_generated_{identity[:12]}_{folder.name}"
    if name not in sys.modules:
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    try:
        walker, attention, merge = (importlib.import_module(f"{name}.{part}") for part in ("walker", "attention", "merge"))
    except SyntaxError as error:
        raise PackageError(f"{error.filename}:{error.lineno}: {error.msg}; mend it, or run `flexgen build`") from None
    if walker.ABI != ABI:
        raise PackageError(f"{folder}/walker.py has ABI {walker.ABI}, and this runtime has {ABI}: run `flexgen build`")
    return Package(folder, manifest, walker, attention, merge)


def _hash(path: Path) -> str:
    if not path.exists():
        raise PackageError(f"{path} is missing: run `flexgen build`")
    return hashlib.sha256(path.read_bytes().replace(b"\r\n", b"\n")).hexdigest()
