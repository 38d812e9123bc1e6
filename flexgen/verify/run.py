"""`verify`: one package, one model, every way of feeding it."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexgen.compiler import UsageError, find_specs
from flexgen.contract.state import Slots
from flexgen.runtime.loading.checkpoint import CheckpointError
from flexgen.runtime.loading.model import DTYPES, Model
from flexgen.runtime.loading.package import find_packages, read_manifest
from flexgen.spec.load import Spec, load_spec
from flexgen.verify import reference
from flexgen.verify.bits import compare_bits, told_by_rounding
from flexgen.verify.harness import Harness
from flexgen.verify.layers import LayerRun
from flexgen.verify.report import Report, Row
from flexgen.verify.trace import marker

PROMPT, OTHER, PREFILL = 40, 29, 24
"""Tokens of the prompt, of the other row in a batch, and of each before decode; more than any tiny window."""

TOLERANCE, RECURRENT_TOLERANCE = 1e-4, 1e-3
"""fp32: logits by absolute error, layers and lines relative to the reference's greatest value.

With recurrent state, rounding grows along the sequence: on six random tiny models, transformers' own fp32 logits were up
to 5e-4 from its fp64 ones, and its chunked form up to 3e-4 from its recurrence.
"""


def verify(
    spec: str | Path,
    checkpoint: str | Path | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    generated: Path | None = None,
) -> Report:
    """Compare a generated package with transformers: by its spec's name or file, looked for in `generated`, or by its folder.

    Without a checkpoint, both models are the spec's `tiny:` model with every tensor random. Raises UsageError for a
    package, spec or device that is not there, a package built from another spec, and a dtype that is none.

    float32 compares sizes of errors; bfloat16 and float16 hold every layer to transformers' own, bit for bit.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype is {dtype!r}, and must be one of {', '.join(DTYPES)}")
    if dtype != "float32" and torch.device(device).type != "cpu":
        raise UsageError(f"{dtype} is compared bit for bit, which kernels on {device!r} do not promise: leave --device out")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):  # the latter from a torch without CUDA
        raise UsageError(f"device is {device!r}, which torch cannot use on this machine: give another --device") from None
    folder = _package(spec, generated)
    manifest = read_manifest(folder)
    name = manifest["name"]
    described = _described(folder, manifest) if checkpoint is None or str(spec) in find_packages() else None
    if checkpoint is not None:
        model = Model.load(checkpoint, dtype=dtype, device=device, generated=folder, allow_edited=True)  # it refuses what is none
        oracle = reference.load(Path(checkpoint), device, DTYPES[dtype])
        return _report(name, str(checkpoint), model, oracle, described)
    assert described is not None
    oracle = reference.tiny(described.model.tiny).to(device)
    with tempfile.TemporaryDirectory() as directory:
        reference.save(oracle, directory)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="edited by hand")  # an edited package is worth comparing
            try:
                model = Model.load(directory, dtype=dtype, device=device, generated=folder, allow_edited=True)
            except CheckpointError as error:
                theirs = error.what.replace(directory, "transformers' own model")
                where = _spec_path(folder, error.role)
                raise UsageError(f"{theirs}{where}: a weight of the spec has another name or shape there") from None
        if dtype != "float32":
            oracle = reference.load(Path(directory), device, DTYPES[dtype])
    return _report(name, "its tiny model with random weights", model, oracle, described)


def _report(name: str, what: str, model: Model, oracle: Any, described: Spec | None) -> Report:
    if model.dtype != torch.float32:
        return compare_bits(name, what, model, oracle, _prompt(PROMPT, model.dims.vocab, 7))
    report = _compare(name, what, model, oracle)
    report.untold = told_by_rounding(described) if described else []
    return report


def _spec_path(folder: Path, role: str | None) -> str:
    """`; spec: PATH` of the table that has a role, nothing where there is no such role."""
    for file in (folder / "attention.py", folder / "walker.py"):
        for number, text in enumerate(file.read_text().splitlines(), 1):
            if "weights." in text and any(f'("{name}"' in text for name in (role, (role or "").removesuffix("_bias"))):
                return f" (spec: {marker(file, number)})"
    return ""


def _described(folder: Path, manifest: Mapping[str, Any]) -> Spec:
    """The spec that a package was built from. Raises UsageError where it says something else by now."""
    name = manifest["name"]
    try:
        (source,) = find_specs([name])
    except UsageError:
        raise UsageError(
            f"no spec `{name}` to take the tiny model from: run this where {name}.yaml lies, or give --checkpoint DIR"
        ) from None
    described = load_spec(source)
    if described.digest != manifest["digest"]:
        raise UsageError(f"{folder} was not built from {source} as it is now: run `flexgen build {source}` first")
    return described


def _package(spec: str | Path, generated: Path | None) -> Path:
    packages = find_packages(generated)
    if (Path(spec) / "manifest.json").exists():
        return Path(spec)
    name = _name(Path(spec)) if Path(spec).is_file() else str(spec)
    if name in packages:
        return packages[name]
    if Path(spec).is_file():
        raise UsageError(f"{spec} has no generated package yet: run `flexgen build {spec}`")
    raise UsageError(f"no generated package `{spec}`: give a spec, a package's folder, or one of {', '.join(packages)}")


def _name(file: Path) -> str:
    """The name that a spec's file gives its package. Raises UsageError for a file that is no spec, SpecError for a wrong one."""
    if file.suffix != ".yaml":
        raise UsageError(f"{file} is a file, and no spec: give a spec, or the folder of a package")
    return load_spec(file).model.name


def _compare(name: str, what: str, model: Model, oracle: Any) -> Report:
    recurrent = any(isinstance(kept, Slots) for kept in model.state.values())
    tolerance = RECURRENT_TOLERANCE if recurrent else TOLERANCE
    tokens, other = _prompt(PROMPT, model.dims.vocab, 7), _prompt(OTHER, model.dims.vocab, 9)
    report = Report(name, what)
    for mode, ours, theirs in _modes(model, oracle, tokens, other):
        report.rows.append(Row(mode, _max_error(ours, theirs), tolerance))
    traced = LayerRun(model, oracle, tokens, tolerance)
    report.lines_compared, report.first_difference = traced.lines, traced.difference
    report.unaligned = traced.unaligned
    return report


def _modes(model: Model, oracle: Any, tokens: list[int], other: list[int]) -> list[tuple[str, Tensor, Tensor]]:
    whole = reference.logits(oracle, tokens)
    decoded = reference.decoded_logits(oracle, tokens, PREFILL)
    other_decoded = reference.decoded_logits(oracle, other, PREFILL)
    chunked = Harness(model, 2, PROMPT)
    chunks = [chunked.feed({1: tokens[a:b]})[1] for a, b in ((0, 1), (1, 17), (17, 20), (20, PROMPT))]
    single = Harness(model, 1, PROMPT)
    single.feed({0: tokens[:PREFILL]})
    steps = [single.feed({0: [token]})[0] for token in tokens[PREFILL:]]
    batch = Harness(model, 3, PROMPT)
    batch.feed({0: tokens[:PREFILL], 2: other[:PREFILL]})
    pairs = [batch.feed({2: [b], 0: [a]}) for a, b in zip(tokens[PREFILL:], other[PREFILL:], strict=False)]
    both = torch.cat([torch.cat([pair[row] for pair in pairs]) for row in (0, 2)])
    return [
        ("whole prefill", Harness(model, 1, PROMPT).feed({0: tokens})[0], whole),
        ("chunked prefill", torch.cat(chunks), whole),
        ("decode", torch.cat(steps), decoded),
        ("batched decode", both, torch.cat([decoded[: len(pairs)], other_decoded])),
    ]


def _max_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.float() - theirs.float()).abs().max())


def _prompt(length: int, vocab: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocab, (length,), generator=generator).tolist()
