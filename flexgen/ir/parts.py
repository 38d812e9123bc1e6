"""The named parts of a spec, each resolved once: the block asks for the ones it uses. One file each knows how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flexgen.ir import attention, experts, gated_delta, mlp
from flexgen.ir.problems import Problems
from flexgen.ir.scope import Scope
from flexgen.ir.shared import Shared
from flexgen.spec import models
from flexgen.spec.diagnostics import SpecPath

SECTIONS: dict[str, Callable[..., Any]] = {"attention": attention.build, "gdn": gated_delta.build, "mlp": mlp.build, "moe": experts.build}
"""What a block can call, and what resolves an entry of each section."""

MIXERS = ("attention", "gdn")
"""The sections whose entries see other tokens, and keep state."""


class Parts(Shared):
    """The parts that were asked for."""

    def __init__(self, model: models.SpecModel, scope: Scope, problems: Problems) -> None:
        super().__init__(model, scope, problems)
        self._built: dict[SpecPath, Any] = {}

    def part(self, section: str, name: str) -> Any:
        """The entry of a name that the section defines."""
        at = (section, name)
        if at not in self._built:
            self.used.add(at)
            self._built[at] = SECTIONS[section](self, name, getattr(self.model, section)[name], at)
        return self._built[at]

    def built(self, section: str) -> list[Any]:
        """The entries of a section that were used, in the spec's order."""
        order = list(getattr(self.model, section))
        return [self._built[section, name] for name in order if (section, name) in self._built]
