"""Where the semantic passes put what they find: one list, so that every problem of a spec is reported in one run."""

from __future__ import annotations

from collections.abc import Mapping

from flexgen.spec.diagnostics import Diagnostic, Note, SpecError, SpecPath, nearest
from flexgen.spec.load import Spec


class Problems:
    """Collects diagnostics of one spec; positions come from spec paths.

    `meant` holds the definitions that misspelt names probably meant: that nothing uses those is no news.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.found: list[Diagnostic] = []
        self.meant: set[SpecPath] = set()

    def add(
        self,
        code: str,
        message: str,
        path: SpecPath,
        *,
        help: str | None = None,
        key: bool = False,
        within: tuple[int, int] | None = None,
        note: tuple[str, SpecPath] | None = None,
    ) -> None:
        """Report a problem at a spec path: its value, its `key`, or characters `within` its text."""
        span = self.spec.span(path, key=key, within=within)
        notes = [Note(note[0], self.spec.path, self.spec.span(note[1], key=True))] if note else []
        self.found.append(Diagnostic(code, message, self.spec.path, span, help=help, notes=notes, subject=path))

    def unknown(
        self,
        what: str,
        name: str,
        known: Mapping[str, SpecPath],
        path: SpecPath,
        code: str = "SPEC008",
        key: bool = False,
    ) -> None:
        """Report a name that is not defined, with the nearest one that is; `known` says where each is defined."""
        near = nearest(name, known)
        listed = ", ".join(f"`{item}`" for item in sorted(known)) or "none is defined"
        help = f"did you mean `{near}`?" if near else f"known: {listed}"
        note = (f"`{near}` is defined here", known[near]) if near else None
        self.meant |= {known[near]} if near else set()
        self.add(code, f"unknown {what} `{name}`", path, help=help, key=key, note=note)

    def raise_if_any(self) -> None:
        """Raises SpecError with everything found."""
        if self.found:
            raise SpecError(self.found)


def defined(section: str, entries: Mapping[str, object]) -> dict[str, SpecPath]:
    """Where each name of a section is defined."""
    return {name: (section, name) for name in entries}
