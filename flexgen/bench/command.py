"""What `flexgen bench` does with its arguments, and the tables it prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from flexgen.bench.engines import Flexgen, Transformers, engine_named
from flexgen.bench.peers import VLLM
from flexgen.bench.profile import profile
from flexgen.bench.results import Result, device_name, file_name, labelled, spare_other_devices
from flexgen.bench.run import measure
from flexgen.bench.shapes import LOADING, SHAPES, shape
from flexgen.bench.workloads import BATCHES, DECODE, WORKLOADS, Workload

_SHOWN_KERNELS = 25


def run_bench(
    console: Console,
    models: Sequence[str] | None,
    workloads: Sequence[str] | None,
    batches: Sequence[int] | None,
    engines: Sequence[str] | None,
    layers: int | None,
    out: Path,
    repeats: int | None = None,
) -> None:
    """Measure every combination, save each figure when it is there, print them as a table."""
    plan = _plan(workloads or list(WORKLOADS), batches, repeats)
    measured = _pairs(models, engines, layers)
    spare_other_devices(
        (
            out / file_name(engine, labelled(model, layers), workload.name, batch)
            for model, engine in measured for workload, batch in plan
        ),
        device_name(),
    )  # fmt: skip
    for model, engine in measured:
        most = max(batch for _, batch in plan)
        options = {"max_num_seqs": most} if engine == "flexgen" else {}
        table = _table(f"{model}, {engine}", "workload", "batch", "tok/s", "bound", "vLLM", "experts", "peak GiB")
        result = None
        for result in measure(engine, model, plan, layers, **options):
            result.save(out)
            table.add_row(*_cells(result))
        console.print(table)
        if result is not None:
            console.print(_startup(result))


def run_profile(
    console: Console,
    models: Sequence[str] | None,
    workloads: Sequence[str] | None,
    batches: Sequence[int] | None,
    layers: int | None,
    out: Path,
) -> None:
    """Print where the time of each combination goes, and write traces. Batch 1 of decode, if none is named."""
    known = _known(models, layers)
    workloads = workloads or [DECODE.name]
    plan = _plan(workloads, batches or ([1] if DECODE.name in workloads else None), None)
    if not torch.cuda.is_available():
        raise ValueError("--profile shows which kernels take a step on a CUDA device, and this machine has none")
    out.mkdir(parents=True, exist_ok=True)
    for model in known:
        running = Flexgen(model, layers, lazy_capture=True, max_num_seqs=max(256, *(batch for _, batch in plan)))
        for workload, batch in plan:
            for phase in profile(running, workload, batch, out / f"trace-{model}-{workload.name}-{batch}"):
                title = f"{model}, {workload.name} of batch {batch}, {phase.name}: {phase.steps} steps of {phase.microseconds:.0f} us"
                table = _table(title, "kernel", "calls", "us", "share", "of 4.15 TB/s")
                for line in (*phase.groups, *phase.kernels[:_SHOWN_KERNELS]):
                    bandwidth = "" if line.bandwidth is None else f"{line.bandwidth:.0%}"
                    share = f"{line.microseconds / phase.microseconds:.1%}"
                    table.add_row(line.name[:90], f"{line.calls:.1f}", f"{line.microseconds:.1f}", share, bandwidth)
                console.print(table)
        console.print(_startup(running))
        running.close()


def _startup(measured: Result | Flexgen) -> str:
    phases = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in measured.startup_seconds.items())
    return f"start-up: {phases}; without a graph: {', '.join(measured.uncaptured) or 'nothing'}"


def _pairs(models: Sequence[str] | None, engines: Sequence[str] | None, layers: int | None) -> list[tuple[str, str]]:
    """(model, engine) of what is to be measured. Raises ValueError for a model that is a way to load of flexgen alone."""
    names, known = [engine_named(name).name for name in engines or ["flexgen"]], _known(models, layers)
    alone = [model for model in models or () if model in LOADING]
    if alone and Transformers.name in names:
        raise ValueError(f"transformers cannot load {alone[0]}: leave out --engine transformers, or this model")
    return [(model, name) for model in known for name in names if name == Flexgen.name or model not in LOADING]


def _known(models: Sequence[str] | None, layers: int | None) -> list[str]:
    names = list(models or SHAPES)
    for name in names:
        shape(name, layers)
    return names


def _check_batches(batches: Sequence[int] | None) -> None:
    for batch in batches or ():
        if batch < 1:
            raise ValueError(f"batch {batch} is out of range: it must be at least 1")


def _plan(workloads: Sequence[str], batches: Sequence[int] | None, repeats: int | None) -> list[tuple[Workload, int]]:
    _check_batches(batches)
    for name in workloads:
        if name not in WORKLOADS:
            raise ValueError(f"no workload {name!r}; there are {', '.join(WORKLOADS)}")
    if batches and DECODE.name not in workloads:
        raise ValueError(
            f"--batch is of decode alone, and only {' and '.join(workloads)} is to be measured; leave it out"
        )
    plan = []
    for name in workloads:
        chosen = batches if batches and name == DECODE.name else BATCHES[name]
        workload = WORKLOADS[name]
        workload = replace(workload, repeats=repeats or workload.repeats)
        plan += [(workload, batch) for batch in chosen]
    return plan


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    return table


def _cells(result: Result) -> tuple[str, ...]:
    bound, peer = result.bound_tokens_per_second, VLLM.get(result.model, {}).get((result.workload, result.batch))
    rate = result.tokens_per_second
    return (
        result.workload,
        str(result.batch),
        f"{rate:.1f}",
        f"{rate / bound:.0%}" if bound else "",
        f"{rate / peer:.2f} x" if peer else "",
        f"{result.experts_touched:.1f}" if result.experts_touched else "",
        f"{result.peak_bytes / 2**30:.1f}",
    )
