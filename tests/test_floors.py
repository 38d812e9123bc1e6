"""Who may import whom: upper floors use lower ones, never the other way. Read from the imports, nothing is run."""

from __future__ import annotations

import ast

import pytest

from flexgen.assets import root

FLEXGEN = root("specs").parent / "flexgen"
FLOORS = (
    ("errors", "assets"),
    ("project",),
    ("contract",),
    ("runtime.ladder", "runtime.transfer", "runtime.garbage"),
    ("runtime.options", "runtime.served", "runtime.surface"),
    ("runtime.ops", "runtime.requests"),
    ("runtime.sampling", "runtime.loading", "runtime.scheduling"),
    ("runtime.execution",),
    ("runtime.arguments", "runtime.beam_search"),
    ("runtime.engine",),
    ("runtime.report",),
    ("runtime.llm",),
    ("runtime.async_engine",),
)
"""From the ground up. Rooms of one floor do not know each other."""

COMPILER = (
    ("errors", "assets"), ("project",), ("contract",), ("spec",), ("ir",), ("render",), ("compiler",), ("diff",), ("new", "explain"),
)  # fmt: skip
TORCH_FREE = {room for floor in COMPILER for room in floor}
RUNS_WITHOUT = {"pydantic", "yaml", "flexgen.spec", "flexgen.ir", "flexgen.render", "flexgen.compiler"}


def imports(path, when_run=False):
    """The modules that a file imports, wherever in it; those for types alone are left out of what is there `when_run`."""
    found, tree = set(), ast.parse(path.read_text())
    for_types = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    skipped = {inner for node in for_types for inner in ast.walk(node)} if when_run else set()
    for node in (node for node in ast.walk(tree) if node not in skipped):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def files(room):
    place = FLEXGEN / room.replace(".", "/")
    return sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]


def rooms_of(path, floors):
    known = sorted((room for floor in floors for room in floor), key=len, reverse=True)
    named = (name.removeprefix("flexgen.") for name in imports(path) if name.startswith("flexgen."))
    return {next((room for room in known if f"{name}.".startswith(f"{room}.")), name) for name in named}


@pytest.mark.parametrize("floors", [FLOORS, COMPILER], ids=["runtime", "compiler"])
def test_no_arrow_goes_up(floors):
    below, wrong = set(), []
    for floor in floors:
        for room in floor:
            allowed = below | {room, "runtime"}
            wrong += [
                f"{path.relative_to(FLEXGEN)} imports {other}"
                for path in files(room)
                for other in sorted(rooms_of(path, floors) - allowed)
                if other in {name for floor in floors for name in floor}
            ]
        below |= set(floor)
    assert wrong == []


def test_every_room_of_the_runtime_stands_on_a_floor():
    there = {f"runtime.{path.stem}" for path in (FLEXGEN / "runtime").iterdir() if path.name[0] != "_"}
    assert there == {room for floor in FLOORS for room in floor if room.startswith("runtime.")}


def test_the_compiler_knows_no_torch_and_the_runtime_no_compiler():
    for room in TORCH_FREE:
        for path in files(room):
            assert "torch" not in {name.split(".")[0] for name in imports(path, when_run=True)}, path
            assert not any(name.startswith("flexgen.runtime") for name in imports(path)), path
    for path in files("runtime"):
        wrong = {name for name in imports(path) if any(f"{name}.".startswith(f"{other}.") for other in RUNS_WITHOUT)}
        assert not wrong, (path, wrong)
