"""Where the time of a call goes, before and after its last prompt token: traces, and tables of kernels."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flexgen.bench.bound import H200_BYTES_PER_SECOND, step_bytes
from flexgen.bench.workloads import Workload

_STEPS = 12

_GROUPS = (
    ("experts", ("_gate_up_", "_down_", "GroupProblem", "grouped")),
    ("attention", ("_attend_kernel",)),
    ("state", ("_delta_kernel", "_conv_kernel", "_solve_kernel", "_scan_kernel")),
    ("matrix products", ("gemm", "nvjet", "gemv", "_linear_", "cutlass", "splitK", "cublas")),
)
"""Kernels that read weights, keys, values or state; everything else moves activations."""


@dataclass(frozen=True)
class Line:
    """One kernel, or group of kernels: calls and microseconds of a step, and the share of bandwidth if it is known."""

    name: str
    calls: float
    microseconds: float
    bandwidth: float | None = None


@dataclass(frozen=True)
class Phase:
    """Prefill or decode: steps, microseconds of each (without the profiler), then kernels, in groups and each."""

    name: str
    steps: int
    microseconds: float
    groups: list[Line]
    kernels: list[Line]


def profile(running: Any, workload: Workload, batch: int, trace: Path) -> list[Phase]:
    """Answer three times: to warm up, by the clock, and under torch's profiler, which writes `trace`-PHASE.json.

    Decode is a few steps at the length of the prompts.
    """
    engine = running.llm.llm_engine

    def prefill() -> None:
        wanted = engine.metrics.prefill_tokens + batch * workload.prompt
        for row, ids in enumerate(prompts):
            engine.add(str(row), ids, workload.params())
        while engine.metrics.prefill_tokens < wanted:
            engine.step()

    def decode() -> None:
        for _ in range(_STEPS):
            engine.step()

    phases = {"prefill": prefill, "decode": decode}
    clock, kernels, steps = {}, {}, {}
    for run in range(3):
        prompts = workload.prompts(batch, run)
        for name, phase in phases.items():
            before = engine.metrics.prefill_steps + engine.metrics.decode_steps
            if run < 2:
                clock[name] = _timed(phase)
            else:
                kernels[name] = _recorded(phase, trace.with_name(f"{trace.name}-{name}.json"))
            steps[name] = engine.metrics.prefill_steps + engine.metrics.decode_steps - before
        engine.abort_all()
    read = step_bytes(running.model, batch, workload.prompt + _STEPS, running.experts_touched(batch))
    of_decode = {"experts": read.experts, "attention": read.pages, "state": read.state, "matrix products": read.dense}
    return [
        _phase(name, steps[name], clock[name], kernels[name], of_decode if name == "decode" else {}) for name in phases
    ]


def _timed(run: Callable[[], None]) -> float:
    """Microseconds."""
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e6


def _recorded(run: Callable[[], None], trace: Path) -> list[Any]:
    """The kernels that ran, in order of their ends."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as recorded:
        run()
        torch.cuda.synchronize()
    recorded.export_chrome_trace(str(trace))
    kernels = [event for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sorted(kernels, key=lambda event: event.time_range.end)


def _phase(name: str, steps: int, clock: float, events: Sequence[Any], read: dict[str, int]) -> Phase:
    """Kernels overlap: each counts from the end of what ended before it, so that their times add up to the device's."""
    calls: Counter[str] = Counter()
    taken: defaultdict[str, float] = defaultdict(float)
    ended = 0.0
    for event in events:
        calls[event.name] += 1
        taken[event.name] += event.time_range.end - max(ended, event.time_range.start)
        ended = event.time_range.end
    kernels = [Line(kernel, calls[kernel] / steps, taken[kernel] / steps) for kernel in calls]
    kernels.sort(key=lambda line: -line.microseconds)
    return Phase(name, steps, clock / steps, _grouped(kernels, read), kernels)


def _grouped(kernels: list[Line], read: dict[str, int]) -> list[Line]:
    members: dict[str, list[Line]] = defaultdict(list)
    for line in kernels:
        members[next((name for name, parts in _GROUPS if any(part in line.name for part in parts)), "the rest")].append(
            line
        )
    lines = []
    for name, of_group in members.items():
        calls, taken = (sum(getattr(line, field) for line in of_group) for field in ("calls", "microseconds"))
        share = read[name] / (taken * 1e-6) / H200_BYTES_PER_SECOND if name in read else None
        lines.append(Line(name, calls, taken, share))
    return sorted(lines, key=lambda line: -line.microseconds)
