"""Launches planned steps: by graphs where there are some, else by the code that they hold. The engine's only way to run.

The host uploads only what changed and reads tokens one step late, so nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from flexgen.runtime.execution.graphs import Graphs
from flexgen.runtime.execution.packed import LAST, Piece
from flexgen.runtime.execution.prompt_scores import PromptScores, score_prompts
from flexgen.runtime.execution.step import DeviceStep
from flexgen.runtime.requests.request import Request
from flexgen.runtime.sampling.sampler import Features, Sampled
from flexgen.runtime.scheduling.scheduler import Row, StepPlan
from flexgen.runtime.transfer import Download, upload


@dataclass
class Routes:
    """The experts (T, routers, K) of one step's tokens, and the row of the step behind each of its tokens in turn."""

    rows: list[Row]
    values: Download

    def hand_over(self) -> None:
        """Give the requests that asked for them their experts, once they have arrived."""
        (values,) = self.values.wait()
        assert values is not None
        for row, experts in zip(self.rows, values.split([row.count for row in self.rows])):
            if row.request.routes is not None:
                row.request.take_routes(row.start, experts.numpy())


@dataclass
class InFlight:
    """A launched step: the requests that drew a token, in row order, and their results on the way to the host."""

    requests: list[Request]
    values: Download | None = None
    routes: Routes | None = None
    scores: list[PromptScores] = field(default_factory=list)


class Runner:
    """Runs one engine's steps. `graphs` are None until `start.capture` made them."""

    def __init__(self, step: DeviceStep) -> None:
        self.step = step
        self.graphs: Graphs | None = None
        self.place_adapter: Callable[[int, int], None] = _no_adapters
        self._weights_checked = step.model.weight_version
        self._batch: tuple[int, ...] = ()
        self._batch_slots = upload([], step.device)

    @torch.no_grad()
    def launch(self, plan: StepPlan) -> InFlight:
        """Queue one step; nothing here waits for the device."""
        for slot, adapter in plan.adapters:
            self.place_adapter(slot, adapter)
        self.step.enter(plan.entered)
        self.step.tables.apply(plan.changes)
        flight = InFlight([row.request for row in plan.rows if row.samples])
        features = Features.of(flight.requests, self.step.model.dims.vocab)
        if sampled := self._replay(plan, flight.requests, features):
            flight.values, flight.routes = sampled.download(), self._routes(plan.rows)
        else:
            self._run(plan, flight, features)
        return flight

    def _replay(self, plan: StepPlan, drawing: Sequence[Request], features: Features) -> Sampled | None:
        """The step by graphs, or None where it has none: host-side rules, prompt logprobs, or a shape not captured."""
        if self.graphs is None or not drawing or any(request.rules for request in drawing):
            return None
        if self._weights_checked != self.step.model.weight_version:
            self.graphs.check_addresses()
            self._weights_checked = self.step.model.weight_version
        slots = [request.slot for request in drawing]
        if plan.decode_only:
            return self.graphs.decode_step(slots, features)
        if any(row.request.params.prompt_logprobs is not None for row in plan.rows):
            return None
        return self.graphs.packed_step(*_pieces(plan.rows), slots, features)

    def _run(self, plan: StepPlan, flight: InFlight, features: Features) -> None:
        """The step by the code itself; its results go into `flight`."""
        if plan.decode_only:
            slots_R = self._decode_slots(plan.rows)
            logits_RV = self.step.decode_logits(slots_R)
            flight.routes = self._routes(plan.rows)
        else:
            pieces, last = _pieces(plan.rows)
            hidden_TD = self.step.pieces_hidden(pieces)
            flight.routes = self._routes(plan.rows)
            flight.scores = score_prompts(self.step, plan.rows, hidden_TD)
            if not flight.requests:
                return
            slots_R = upload([request.slot for request in flight.requests], self.step.device)
            logits_RV = self.step.logits(hidden_TD[upload(last, self.step.device)], slots_R)
        flight.values = self.step.draw(logits_RV, slots_R, features, flight.requests).download()

    def _routes(self, rows: Sequence[Row]) -> Routes | None:
        """The experts that the step's tokens were sent to, if a request asked for its own."""
        recorded = self.step.cache.recorded
        if recorded is None or all(row.request.routes is None for row in rows):
            return None
        tokens = sum(row.count for row in rows)
        return Routes(list(rows), Download((recorded[:, :tokens].transpose(0, 1).contiguous(),)))

    def _decode_slots(self, rows: Sequence[Row]) -> Tensor:
        """The slots of a decode batch that no graph serves; uploaded only when the batch is another one."""
        batch = tuple(row.request.slot for row in rows)
        if batch != self._batch:
            self._batch, self._batch_slots = batch, upload(batch, self.step.device)
        return self._batch_slots


def _no_adapters(slot: int, adapter: int) -> None:
    raise AssertionError(f"adapter {adapter} was given slot {slot} of an engine without adapters")


def _pieces(rows: Sequence[Row]) -> tuple[list[Piece], list[int]]:
    """The tokens of a step's rows, and which of them are the last ones of the rows that draw."""
    pieces = []
    for row in rows:
        ids = (LAST,) if row.decodes else row.request.tokens[row.start : row.start + row.count]
        pieces.append(Piece(row.request.slot, row.start, ids))
    ends = accumulate(row.count for row in rows)
    return pieces, [end - 1 for row, end in zip(rows, ends) if row.samples]
