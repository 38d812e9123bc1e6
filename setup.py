"""Copies specs, templates, generated code and the schema into the wheel."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ASSETS = ("specs", "templates", "generated", "schema")


class BuildWithAssets(build_py):
    """`build_py` that adds `flexgen/_assets`."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for name in ASSETS:
            target = Path(self.build_lib) / "flexgen" / "_assets" / name
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(name, target, ignore=shutil.ignore_patterns("__pycache__", ".building"))


setup(cmdclass={"build_py": BuildWithAssets})
