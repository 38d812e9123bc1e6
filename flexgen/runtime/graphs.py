"""Decode as two CUDA graphs a batch size: slots -> logits, and logits -> tokens that the next step reads.

A graph replays addresses. What it reads lies in tables by slot, which stay where they are; the slots themselves and the
logits have buffers here. All graphs share one memory pool, since they run one after the other and leave nothing in it that
is read later but the few numbers that were sampled.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flexgen.runtime.abi import PAD_SLOT
from flexgen.runtime.errors import FlexgenError
from flexgen.runtime.sampler import Features, Sampled
from flexgen.runtime.transfer import upload

log = logging.getLogger(__name__)

_STEPS = ((4, 1), (8, 2), (16, 4), (64, 8), (128, 16), (256, 32), (512, 64))
"""(up to, in steps of): a padding row costs a share of its batch, and in a MoE model experts of its own."""


def ladder(most: int) -> list[int]:
    """Batch sizes to capture, ascending: 1 to `most`, both included, fine where batches are small."""
    sizes, size = [], 0
    while size < most:
        size += next((step for top, step in _STEPS if size < top), 128)
        sizes.append(min(size, most))
    return sizes


@dataclass
class Captured:
    """A graph, and the tensors that its replay writes."""

    graph: torch.cuda.CUDAGraph
    result: Any


@dataclass
class Graphs:
    """The captured decode steps of one engine.

    forward  (slots_R,) -> logits (R, V): embedding, layers, head, for the slots' last tokens
    draw     (logits_RV, slots_R, features) -> Sampled
    reset    brings the pad slot back to its first state
    reads    the tensors that the graphs read, by name
    sizes    the ladder, ascending
    failures  what could not be captured and runs without a graph, with the reason
    """

    forward: Callable[[Tensor], Tensor]
    draw: Callable[[Tensor, Tensor, Features], Sampled]
    reset: Callable[[], None]
    reads: Callable[[], Iterator[tuple[str, Tensor]]]
    sizes: Sequence[int]
    device: torch.device
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self._slots_S = torch.zeros(self.sizes[-1], dtype=torch.int64, device=self.device)
        self._batch: tuple[int, ...] = ()
        self._logits_SV: Tensor | None = None
        self._forwards: dict[int, Captured | None] = {}
        self._draws: dict[tuple[int, Features], Captured | None] = {}
        self._addresses: dict[str, int] = {}

    def step(self, slots: Sequence[int], features: Features) -> Sampled:
        """One decode step of the requests in `slots`: the rows of the result, and padding rows after them."""
        size = self.sizes[bisect_left(self.sizes, len(slots))]
        self.capture(size, features)
        self._place((*slots, *[PAD_SLOT] * (size - len(slots))))
        return self._replay(size, features)

    def capture(self, size: int, features: Features) -> None:
        """Capture whatever of this batch size is not yet there. Only the pad slot and the pad page are written."""
        if size not in self._forwards:
            self._place((PAD_SLOT,) * size)
            self._forwards[size] = self._capture_forward(size)
        if (size, features) not in self._draws:
            self._place((PAD_SLOT,) * size)
            self._draws[size, features] = self._capture_draw(size, features)

    def check_addresses(self) -> None:
        """Raise if a tensor that a graph reads has moved since it was captured."""
        now = {name: tensor.data_ptr() for name, tensor in self.reads()}
        moved = [name for name, address in self._addresses.items() if now.get(name) != address]
        if moved:
            listed = ", ".join(moved[:5]) + (f" and {len(moved) - 5} more" if len(moved) > 5 else "")
            raise FlexgenError(f"captured decode steps read {listed}, which moved; weights must be updated in place")

    def _place(self, slots: tuple[int, ...]) -> None:
        if slots != self._batch:
            self._slots_S[: len(slots)] = upload(slots, self.device)
            self._batch = slots

    def _replay(self, size: int, features: Features) -> Sampled:
        slots_R = self._slots_S[:size]
        forward, draw = self._forwards[size], self._draws[size, features]
        if forward is None:
            self._logits_SV[:size] = self.forward(slots_R)
        else:
            forward.graph.replay()
        if draw is None:
            return self.draw(self._logits_SV[:size], slots_R, features)
        draw.graph.replay()
        return draw.result

    def _capture_forward(self, size: int) -> Captured | None:
        slots_R = self._slots_S[:size]
        self.reset()
        expected_RV = self.forward(slots_R)
        if self._logits_SV is None:
            self._logits_SV = expected_RV.new_empty((self.sizes[-1], expected_RV.shape[1]))
        captured = self._captured(
            f"the forward pass of {size} rows", lambda: self._logits_SV[:size].copy_(self.forward(slots_R))
        )
        if captured is None:
            return None
        self.reset()
        captured.graph.replay()
        if not torch.equal(self._logits_SV[:size], expected_RV):
            return self._fail(f"the forward pass of {size} rows", "its replay differs from the same code run directly")
        return captured

    def _capture_draw(self, size: int, features: Features) -> Captured | None:
        slots_R = self._slots_S[:size]
        self._logits_SV[:size].zero_()
        self.draw(self._logits_SV[:size], slots_R, features)
        return self._captured(
            f"sampling {size} rows with {features}", lambda: self.draw(self._logits_SV[:size], slots_R, features)
        )

    def _captured(self, what: str, run: Callable[[], Any]) -> Captured | None:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                result = run()
        except RuntimeError as error:  # an operation that cannot be captured: the step still runs, and the report says so
            return self._fail(what, str(error).splitlines()[0])
        self._addresses.update((name, tensor.data_ptr()) for name, tensor in self.reads())
        return Captured(graph, result)

    def _fail(self, what: str, why: str) -> None:
        self.failures.append(f"{what} runs without a graph: {why}")
        log.warning("%s", self.failures[-1])
