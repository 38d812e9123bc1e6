"""How git and GitHub treat generated code: collapsed but for one architecture, and never merged line by line."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from project import ROOT, Project

from flexgen.compiler import find_specs


@pytest.fixture
def project(tmp_path):
    made = Project(tmp_path)
    shutil.copy(ROOT / ".gitattributes", tmp_path)
    made.commit()
    return made


def attributes(project: Project, *paths: str) -> dict[str, dict[str, str]]:
    command = ["git", "-C", str(project.folder), "check-attr", "linguist-generated", "merge", "eol", "--", *paths]
    found: dict[str, dict[str, str]] = {}
    for line in subprocess.check_output(command, text=True).splitlines():
        path, name, value = line.split(": ")
        found.setdefault(path, {})[name] = value
    return found


def test_one_architecture_is_shown_and_the_others_are_collapsed(project):
    files = ("walker.py", "attention.py", "merge.py", "manifest.json")
    paths = [f"generated/{path.stem}/{file}" for path in find_specs([]) for file in files]
    found = attributes(project, *paths)
    assert len(found) == len(paths)
    assert all((row["merge"], row["eol"]) == ("binary", "lf") for row in found.values())
    assert {row["linguist-generated"] for row in found.values()} == {"true", "false"}
    assert {path.split("/")[1] for path, row in found.items() if row["linguist-generated"] == "false"} == {"llama"}


def test_what_people_write_is_merged_and_shown(project):
    found = attributes(project, "specs/llama.yaml", "templates/walker.py.j2", "flexgen/cli/__init__.py", "README.md")
    assert len(found) == 4
    assert all(row == {"linguist-generated": "unspecified", "merge": "unspecified", "eol": "lf"} for row in found.values())


def test_generated_code_that_changed_on_both_sides_is_a_conflict(project):
    """Lines far apart would merge as text, to code that no spec makes."""
    path = project.folder / "generated/llama/walker.py"
    text = path.read_text()
    project.git("checkout", "-q", "-b", "other")
    path.write_text(text + "# the end\n")
    project.git("commit", "-q", "-a", "-m", "x")
    project.git("checkout", "-q", "main")
    path.write_text("# the beginning\n" + text)
    project.git("commit", "-q", "-a", "-m", "x")
    with pytest.raises(subprocess.CalledProcessError):
        project.git("merge", "-q", "other")
    assert path.read_text() == "# the beginning\n" + text
