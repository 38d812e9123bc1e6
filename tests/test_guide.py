"""The guide, run: every file it shows is written, every command it shows is run, and what it prints is what it says.

    python tests/test_guide.py      # writes the outputs anew; then review the diff of docs/guide.md
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GUIDE = ROOT / "docs" / "guide.md"
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = 'flexgen() { "$PYTHON" -m flexgen "$@"; }; python() { "$PYTHON" "$@"; }; '
VARYING = ((r"[0-9.]+e-[0-9]+", "1e-9"), (r"\bw[0-9]+\b", "w0"))
"""What differs from machine to machine: rounding errors, and the words that a random model says."""


def project(folder: Path) -> Path:
    """A checkout of its own without the guide's spec, which it writes."""
    for name in ("flexgen", "specs", "templates", "generated", "schema"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "mixtral", "mixtral.yaml"))
    return folder


def run(command: str, folder: Path) -> str:
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
    done = subprocess.run(["bash", "-c", SHELL + command], cwd=folder, env=environment, capture_output=True, text=True)
    return (done.stdout + done.stderr).replace(f"{folder}/", "")


def play(text: str, folder: Path) -> list[tuple[str, str, str]]:
    """Do what the guide says, in order. -> (command, what the guide shows, what it printed)"""
    seen = []
    for kind, name, body in BLOCK.findall(text):
        if name:
            (folder / name).write_text(body)
        elif kind == "console":
            for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
                command, _, shown = part.partition("\n")
                seen.append((command, shown.rstrip("\n"), run(command, folder).rstrip("\n")))
    return seen


def steady(text: str) -> str:
    for pattern, replacement in VARYING:
        text = re.sub(pattern, replacement, text)
    return text


def test_the_guide_says_what_happens(tmp_path):
    seen = play(GUIDE.read_text(), project(tmp_path))
    assert len(seen) > 8
    for command, shown, printed in seen:
        assert steady(printed) == steady(shown), command


def test_the_readme_links_the_guide():
    assert "docs/guide.md" in (ROOT / "README.md").read_text()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        text, done = GUIDE.read_text(), 0
        for command, shown, printed in play(text, project(Path(folder))):
            old, new = (f"$ {command}\n" + (f"{output}\n" if output else "") for output in (shown, printed))
            at = text.index(old, done)
            text, done = text[:at] + new + text[at + len(old) :], at + len(new)
        GUIDE.write_text(text)


if __name__ == "__main__":
    main()
