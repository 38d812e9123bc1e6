"""Steps as CUDA graphs: one that ends in logits and one that draws tokens from them, which the next step reads.

A graph replays addresses. What it reads lies in tables by slot, which stay where they are; the slots themselves, the
numbers of a step with prompts, and the logits have buffers here. All graphs share one memory pool, since they run one
after the other and leave nothing in it that is read later but the few numbers that were sampled.

`start` makes them, `runner` asks them for each step.

Shape suffixes: S slots of the largest size, R rows, V vocabulary.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flexgen.contract.abi import PAD_SLOT
from flexgen.errors import FlexgenError
from flexgen.runtime.execution.packed import Packed, Piece, Shape, numbers
from flexgen.runtime.execution.step import DeviceStep
from flexgen.runtime.sampling.sampler import Features, Sampled
from flexgen.runtime.transfer import upload

log = logging.getLogger(__name__)

_PACKED_ROWS = (4, 8, 16, 32, 64, 128, 256)
_TOKENS_OF_ROW = 4
"""Steps with prompts are captured up to the size from which the device, not the host, sets their pace."""


def packed_shapes(most_tokens: int, most_rows: int, block_size: int) -> list[Shape]:
    """Shapes of steps with prompts to capture, ascending.

    A capture is checked on rows that share a page: it has to hold their tokens.
    """
    shapes = [Shape(_TOKENS_OF_ROW * rows, rows) for rows in _PACKED_ROWS if rows <= most_rows]
    return [shape for shape in shapes if shape.tokens <= most_tokens and block_size >= _TOKENS_OF_ROW]


@dataclass
class Captured:
    """A graph, and the tensors that its replay writes."""

    graph: torch.cuda.CUDAGraph
    result: Any


@dataclass
class Graphs:
    """The captured steps of one engine.

    step           the code that they hold, run directly where a capture failed
    sizes, shapes  of decode steps and of steps with prompts, ascending
    longest        most tokens of one request
    failures       what could not be captured and runs without a graph, with the reason
    """

    step: DeviceStep
    sizes: Sequence[int]
    shapes: Sequence[Shape]
    longest: int
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        model, self.device = self.step.model, self.step.device
        dtype = model.head_dtype or model.dtype
        self.logits_SV = torch.zeros((self.sizes[-1], model.dims.vocab), dtype=dtype, device=self.device)
        self._pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self._slots_S = torch.zeros(self.sizes[-1], dtype=torch.int64, device=self.device)
        most = max((shape.numbers for shape in self.shapes), default=0)
        self._numbers = torch.zeros(most, dtype=torch.int64, device=self.device)
        self._batch: tuple[int, ...] = ()
        self._forwards: dict[int | Shape, Captured | None] = {}
        self._draws: dict[tuple[int, Features], Captured | None] = {}
        self._addresses: dict[str, int] = {}

    def capture_all(self, features: Sequence[Features]) -> None:
        """Capture every size and shape, largest first, with the draws of `features`. No request may be running."""
        for size in reversed(self.sizes):
            slots = list(range(1, size + 1))
            for each in features:
                self._capture_draw(size, each)
            self._place(slots)
            self._capture_forward(size, slots, size, fresh=True)
        for shape in reversed(self.shapes):
            slots = [1 + row % self.sizes[-1] for row in range(shape.rows)]
            self._pack([Piece(slot, 0, (0,) * _TOKENS_OF_ROW) for slot in slots], ())
            self._capture_forward(shape, slots, min(shape.rows, self.sizes[-1]), fresh=True)

    def decode_step(self, slots: Sequence[int], features: Features) -> Sampled:
        """One token for each of `slots`: the first rows of the result; padding rows follow."""
        size = self._draw_size(slots, features)
        self._place(slots)
        self._capture_forward(size, slots, len(slots))
        self._run(size)
        return self._draw(size, features)

    def packed_step(
        self, pieces: Sequence[Piece], last: Sequence[int], drawing: Sequence[int], features: Features
    ) -> Sampled | None:
        """A step with prompts, whose slots `drawing` draw after the tokens `last`; None if no shape holds the pieces."""
        for shape in self.shapes:
            if (filled := shape.fill(pieces, self.longest)) is not None:
                break
        else:
            return None
        size = self._draw_size(drawing, features)
        self._pack(filled, last)
        self._capture_forward(shape, [piece.slot for piece in pieces], len(drawing))
        self._run(shape)
        self._place(drawing)
        return self._draw(size, features)

    @torch.no_grad()
    def renew(self, at_once: bool) -> None:
        """Forget the captured forward passes, since they read tensors in whose place others are now; draws stay.

        at_once: capture them again now, else each when it is next met. No request may be running.
        """
        self._forwards.clear()
        self._addresses = {name: tensor.data_ptr() for name, tensor in self.step.tensors()}
        if at_once:
            self.capture_all(())

    def check_addresses(self) -> None:
        """Raise if a tensor that a graph reads has moved since it was captured."""
        now = {name: tensor.data_ptr() for name, tensor in self.step.tensors()}
        moved = [name for name, address in self._addresses.items() if now.get(name) != address]
        if moved:
            listed = ", ".join(moved[:5]) + (f" and {len(moved) - 5} more" if len(moved) > 5 else "")
            raise FlexgenError(f"captured decode steps read {listed}, which moved; weights must be updated in place")

    def _place(self, slots: Sequence[int]) -> None:
        """The slots of a decode step or a draw, and padding up to the size that serves them."""
        size = self.sizes[bisect_left(self.sizes, len(slots))]
        batch = (*slots, *[PAD_SLOT] * (size - len(slots)))
        if batch != self._batch:
            self._slots_S[:size] = upload(batch, self.device)
            self._batch = batch

    def _pack(self, pieces: Sequence[Piece], last: Sequence[int]) -> None:
        flat = upload(numbers(pieces, last), self.device)
        self._numbers[: len(flat)] = flat

    def _draw_size(self, slots: Sequence[int], features: Features) -> int:
        size = self.sizes[bisect_left(self.sizes, len(slots))]
        if (size, features) not in self._draws:
            self._capture_draw(size, features)
        return size

    def _run(self, key: int | Shape) -> None:
        """Leave the logits of a decode step's size, or of a shape, in `logits_SV`."""
        if (captured := self._forwards[key]) is not None:
            captured.graph.replay()
        else:
            self._leave(self._forward(key)())

    def _forward(self, key: int | Shape) -> Callable[[], Tensor]:
        if isinstance(key, int):
            return lambda: self.step.decode_logits(self._slots_S[:key])
        packed = Packed.of(self._numbers, key)
        return lambda: self.step.packed_logits(packed)[: self.sizes[-1]]

    def _leave(self, logits_RV: Tensor) -> None:
        self.logits_SV[: len(logits_RV)].copy_(logits_RV)

    def _draw(self, size: int, features: Features) -> Sampled:
        if (captured := self._draws[size, features]) is not None:
            captured.graph.replay()
            return captured.result
        return self.step.draw(self.logits_SV[:size], self._slots_S[:size], features)

    def _capture_forward(self, key: int | Shape, slots: Sequence[int], live: int, fresh: bool = False) -> None:
        """Capture a forward pass that is not yet there, with the inputs that are in place, and leave state as it was.

        A replay must equal the same code run directly, bit for bit, in the first `live` rows. `fresh`: state is zero.
        """
        if key in self._forwards:
            return
        what = f"decode of {key} rows" if isinstance(key, int) else f"a step of {key.tokens} tokens in {key.rows} rows"
        forward = self._forward(key)
        slots_R, cache = upload(slots, self.device), self.step.cache
        restore = partial(cache.clear_state, slots_R) if fresh else cache.keep_state(slots_R)
        expected_RV = forward()[:live].clone()
        restore()
        captured = self._captured(what, lambda: self._leave(forward()))
        if captured is not None:
            captured.graph.replay()
            if not torch.equal(self.logits_SV[:live], expected_RV):
                self._fail(what, "its replay differs from the same code run directly")
                captured = None
            restore()
        self._forwards[key] = captured

    def _capture_draw(self, size: int, features: Features) -> None:
        self._place([PAD_SLOT] * size)
        logits_RV, slots_R = self.logits_SV[:size].zero_(), self._slots_S[:size]
        self.step.sampling.forget(PAD_SLOT)  # what padding rows drew counts for nobody
        expected = self.step.draw(logits_RV, slots_R, features)
        what = f"sampling {size} rows with {features}"
        captured = self._captured(what, lambda: self.step.draw(logits_RV, slots_R, features))
        self.step.sampling.forget(PAD_SLOT)
        if captured is not None:
            captured.graph.replay()
            same = (getattr(captured.result, name).equal(getattr(expected, name)) for name in ("tokens_R", "logprobs_R"))
            if not all(same):
                self._fail(what, "its replay differs from the same code run directly")
                captured = None
        self._draws[size, features] = captured

    def _captured(self, what: str, run: Callable[[], Any]) -> Captured | None:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # others may use the device
                result = run()
        except RuntimeError as error:  # an operation that cannot be captured: the step still runs, and the report says so
            self._fail(what, str(error).splitlines()[0])
            return None
        self._addresses.update((name, tensor.data_ptr()) for name, tensor in self.step.tensors())
        return Captured(graph, result)

    def _fail(self, what: str, why: str) -> None:
        self.failures.append(f"{what} runs without a graph: {why}")
        log.warning("%s", self.failures[-1])
