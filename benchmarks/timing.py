"""How the kernel benchmarks time and what they compare with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from flexgen.bench.bound import H200_BYTES_PER_SECOND

Call = Callable[[], object]


def seconds(calls: Sequence[Call], device: torch.device, *, captured: bool = True, repeats: int = 20) -> float:
    """Median seconds of one call. `calls` do the same work on different data, so that no cache holds it all.

    On CUDA they are captured into one graph and replayed, unless they wait for the device (`captured=False`).
    """
    if device.type == "cuda":
        return _cuda_seconds(calls, captured, repeats)
    calls[0]()
    taken = []
    for _ in range(min(repeats, 5)):
        begin = time.perf_counter()
        for call in calls:
            call()
        taken.append((time.perf_counter() - begin) / len(calls))
    return median(taken)


def _cuda_seconds(calls: Sequence[Call], captured: bool, repeats: int) -> float:
    for call in calls:
        call()
    torch.cuda.synchronize()

    def run() -> None:
        for call in calls:
            call()

    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
        run()
    taken = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return median(taken)


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second: the measured figure of an H200 on CUDA, else what a reduction over 256 MiB reaches here."""
    if device.type == "cuda":
        return H200_BYTES_PER_SECOND
    data = torch.ones(2**26)
    return data.numel() * data.element_size() / seconds([data.sum], device)
