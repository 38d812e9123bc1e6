"""A project of its own in a temporary folder, with a git repository that is real."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from flexgen.assets import root

ROOT = root("specs").parent
SPECS = ("llama", "qwen3", "qwen3_moe")
AUTHOR = {
    **os.environ,
    "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b",
    "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CEILING_DIRECTORIES": "/tmp",
}  # fmt: skip


class Project:
    """Specs, templates and generated code of some architectures, and the compiler that serves them."""

    def __init__(self, folder: Path, specs: tuple[str, ...] = SPECS) -> None:
        self.folder = folder
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "flexgen", folder / "flexgen", ignore=ignore)
        shutil.copytree(ROOT / "templates", folder / "templates")
        for name in specs:
            (folder / "specs").mkdir(exist_ok=True)
            shutil.copy(ROOT / "specs" / f"{name}.yaml", folder / "specs")
            shutil.copytree(ROOT / "generated" / name, folder / "generated" / name, ignore=ignore)

    def edit(self, path: str, old: str, new: str) -> None:
        text = (self.folder / path).read_text()
        assert text.count(old) >= 1, (path, old)
        (self.folder / path).write_text(text.replace(old, new, 1))

    def git(self, *arguments: str) -> None:
        command = ["git", "-C", str(self.folder), *arguments]
        subprocess.run(command, check=True, env=AUTHOR, capture_output=True)

    def commit(self, branch: str = "main") -> None:
        if not (self.folder / ".git").exists():
            self.git("init", "-q", "-b", branch)
            (self.folder / ".gitignore").write_text("__pycache__/\n")
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "x")

    def flexgen(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the project's own compiler, as a checkout does."""
        command = [sys.executable, "-m", "flexgen", *arguments]
        env = {**AUTHOR, **environment}
        return subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True)
