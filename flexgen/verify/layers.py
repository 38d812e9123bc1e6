"""Each generated layer on the reference's own input of that layer, so that errors do not pile up."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexgen.contract.abi import Layer
from flexgen.runtime.loading.model import Model
from flexgen.verify import reference
from flexgen.verify.harness import Harness
from flexgen.verify.modules import Modules
from flexgen.verify.reference import Call, recorded
from flexgen.verify.report import Difference
from flexgen.verify.trace import Fault, Place, Tracer, error, marker


class Found(Exception):
    """Ends a traced run at its first fault."""


class LayerRun:
    """One traced pass of a whole prompt. `difference` is the first, or None; `lines` how many were held to a module.

    A line may differ from its module although what follows is right: a reference that norms heads after it has transposed
    them gives its module another order. Such lines are `unaligned`: where the layer's own output agrees, they are no fault.
    """

    def __init__(self, model: Model, oracle: Any, tokens: Sequence[int], tolerance: float) -> None:
        self.model, self.tolerance = model, tolerance
        self.modules = Modules(model, oracle)
        with recorded(self.modules.watched()) as calls:
            self.logits = reference.logits(oracle, tokens)
        self.calls: dict[str, Call] = calls
        self.index = {id(layer): index for index, layer in enumerate(model.layers)}
        owners = {id(model.weights): None, **self.index}
        self.tracer = Tracer(model.package.folder, owners, self._expected, tolerance)
        self.at: int | None = None
        self.errors: list[float] = []
        self.unaligned: list[Difference] = []
        self.difference = self._run(tokens)
        self.lines = len(self.tracer.compared)

    def _expected(self, layer: int | None, role: str) -> list[Call]:
        names = self.modules.by_role.get((layer, role), ())
        return [self.calls[name] for name in names] if all(name in self.calls for name in names) else []

    def _run(self, tokens: Sequence[int]) -> Difference | None:
        walker = self.model.walker
        ids_T, step = Harness(self.model, 1, len(tokens)).step({0: tokens})
        run, walker.run = walker.run, [self._held(function) for function in walker.run]
        try:
            with torch.no_grad(), self.tracer.watching():
                logits_TV = walker.logits(walker.forward(ids_T, step))
            self._check(error(logits_TV, self.logits), "the logits", self.tracer.last_return)
        except Found:
            return self._difference(self.tracer.faults[0])
        finally:
            walker.run = run
        return None

    def _held(self, function: Any) -> Any:
        """A layer function that starts from the reference's input and hands on the reference's output."""

        def layer(w: Layer, x_TD: Tensor, *rest: Any) -> Tensor:
            index = self.index[id(w)]
            call = self.calls[self.modules.layers[index]]
            assert call.input is not None and call.first_output is not None
            given_TD, output_TD = call.input.flatten(0, -2), call.first_output.flatten(0, -2)
            if index == 0:
                self._check(error(x_TD, given_TD), "the input of layer 0", self._embedding_line())
            self.at = index
            ours_TD = function(w, given_TD, *rest)
            self.errors.append(error(ours_TD, output_TD))
            self._check(self.errors[-1], "the layer's output", self.tracer.last_return)
            self.at = None
            return output_TD

        return layer

    def _embedding_line(self) -> Place:
        file = Path(str(self.model.package.walker.__file__))
        lines = file.read_text().splitlines()
        return Place(file, next(n for n, text in enumerate(lines, 1) if "x_TD = embed(" in text))

    def _check(self, difference: float, what: str, place: Place | None) -> None:
        if difference > self.tolerance:
            assert place is not None, "a generated function returned without being traced"
            self.tracer.faults.append(Fault(place, what, difference))
            raise Found
        self.unaligned += [self._difference(fault) for fault in self.tracer.faults]
        self.tracer.faults.clear()

    def _difference(self, fault: Fault) -> Difference:
        place = fault.place
        walker = Path(str(self.model.package.walker.__file__))
        return Difference(
            layer=self.at,
            kind=None if self.at is None else self.model.dims.kinds[self.at],
            block=None if place.layer_line is None else marker(walker, place.layer_line),
            spec=marker(place.file, place.line),
            file=_shown(place.file),
            line=place.line,
            agreed=place.agreed,
            code=place.file.read_text().splitlines()[place.line - 1].strip(),
            what=fault.what,
            error=fault.error,
        )


def _shown(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
