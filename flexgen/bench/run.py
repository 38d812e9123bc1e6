"""Measure engines: build one, run its workloads, keep the figures."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from flexgen.bench.engines import engine_named
from flexgen.bench.results import Result, commit, device_name, labelled, versions
from flexgen.bench.workloads import Workload

_WARM_UP_TOKENS = 8


def measure(
    engine: str, model: str, plan: Sequence[tuple[Workload, int]], layers: int | None = None, **options: Any
) -> Iterator[Result]:
    """Yield the figure of each (workload, batch) of `plan`, all on one engine. Raises ValueError for an unknown name."""
    running = engine_named(engine)(model, layers, **options)
    try:
        for workload, batch in plan:
            rate = throughput(running, workload, batch)
            yield Result(
                engine=engine,
                model=labelled(model, layers),
                workload=workload.name,
                batch=batch,
                repeats=workload.repeats,
                tokens_per_second=rate,
                bound_tokens_per_second=running.bound(batch, workload),
                experts_touched=running.experts_touched(batch),
                peak_bytes=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
                weight_bytes=running.weight_bytes,
                kv_bytes=running.kv_bytes,
                startup_seconds=running.startup_seconds,
                uncaptured=running.uncaptured,
                device=device_name(),
                versions=versions(),
                commit=commit(),
                command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            )
    finally:
        running.close()


def throughput(running: Any, workload: Workload, batch: int) -> float:
    """Generated tokens a second of the whole call: the median of the workload's repeats after a warm-up.

    It is a short one, but for an engine whose memory grows with the answers.
    """
    warm_up = workload if running.grows else replace(workload, new=_WARM_UP_TOKENS)
    running.generate(workload.prompts(batch, run=0), warm_up)
    rates = []
    for run in range(1, workload.repeats + 1):
        prompts = workload.prompts(batch, run)
        started = time.perf_counter()
        tokens = running.generate(prompts, workload)
        rates.append(tokens / (time.perf_counter() - started))
    return median(rates)
