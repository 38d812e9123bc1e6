"""Where the time of a decode step goes: a trace, and a table of kernels."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from flexgen.bench.bound import H200_BYTES_PER_SECOND, step_bytes
from flexgen.bench.workloads import DECODE

_STEPS = 24

_GROUPS = (
    ("experts", ("_gate_up_", "_down_")),
    ("attention", ("_attend_kernel",)),
    ("state", ("_delta_kernel", "_conv_kernel")),
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
class Profile:
    """Decode at one batch size: microseconds of a step and of the prefill before it, then kernels, in groups and each."""

    step: float
    prefill: float
    groups: list[Line]
    kernels: list[Line]


def profile(running: Any, batch: int, trace: Path | None = None) -> Profile:
    """Run some decode steps under torch's profiler; writes a Chrome trace to `trace`."""
    workload = replace(DECODE, new=_STEPS + 1)
    running.generate(DECODE.prompts(batch, run=0), workload)
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    engine = running.llm.llm_engine
    groups = [engine.add(str(row), ids, workload.params()) for row, ids in enumerate(DECODE.prompts(batch, run=1))]
    started = time.perf_counter()
    engine.step()
    torch.cuda.synchronize()
    prefill = time.perf_counter() - started
    engine.step()
    engine.step()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.profiler.profile(activities=activities) as recorded:
        steps = engine.metrics.decode_steps
        begin.record()
        for _ in range(_STEPS // 2):
            engine.step()
        end.record()
        torch.cuda.synchronize()
        steps = engine.metrics.decode_steps - steps
    for group in groups:
        engine.abort(group)
    if trace is not None:
        recorded.export_chrome_trace(str(trace))
    kernels = sorted(_kernels(recorded, steps), key=lambda line: -line.microseconds)
    read = step_bytes(running.model, batch, DECODE.prompt + _STEPS / 2, running.experts_touched(batch))
    of_group = {"experts": read.experts, "attention": read.pages, "state": read.state, "matrix products": read.dense}
    return Profile(begin.elapsed_time(end) * 1e3 / steps, prefill * 1e6, _grouped(kernels, of_group), kernels)


def _kernels(recorded: Any, steps: int) -> list[Line]:
    """Kernels overlap: each counts from the end of what ended before it, so that their times add up to the device's."""
    events = [event for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    calls, taken, ended = Counter(), Counter(), 0.0
    for event in sorted(events, key=lambda event: event.time_range.end):
        calls[event.name] += 1
        taken[event.name] += event.time_range.end - max(ended, event.time_range.start)
        ended = event.time_range.end
    return [Line(name, calls[name] / steps, taken[name] / steps) for name in calls]


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
