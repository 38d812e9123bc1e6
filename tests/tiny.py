"""Tiny models of every spec, made by transformers with every tensor random, saved once a process and shared by the tests.

Steps by hand are `flexgen.verify.harness`, which tests use as `verify` does.

Importing this needs neither pydantic nor transformers, so that a machine with a GPU can run checkpoints made elsewhere.
"""

from __future__ import annotations

import copy
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from flexgen.assets import root
from flexgen.verify.reference import logits as expected
from flexgen.verify.reference import save
from flexgen.verify.reference import tiny as reference

__all__ = ["ALIKE", "LEAST", "SOME", "SPECS", "dump", "expected", "prompt", "reference", "saved", "tiny_config"]

SPECS = sorted(path.stem for path in root("specs").glob("*.yaml"))
ALIKE = [
    *("cohere", "ernie4_5", "ernie4_5_moe", "falcon_new", "gemma", "gemma2", "gemma3", "granite", "granitemoe", "hunyuan_v1_dense"),
    *("ministral3", "mistral", "mixtral", "nemotron", "olmo2", "olmoe", "phimoe", "qwen2", "qwen2_moe", "smollm3", "starcoder2"),
]
"""Specs whose layers are made of words that another's are made of too: what tests every word does not need them each time."""

LEAST = {"phi3": 17}
"""Tokens of a prompt: longrope turns by its long factors from there on, as an engine does for every length."""

SOME = [pytest.param(spec, marks=pytest.mark.slow) if spec in ALIKE else spec for spec in SPECS]
"""Every spec, those that are alike marked slow."""


def tiny_config(spec: str, **changes: Any) -> dict[str, Any]:
    """The spec's `tiny:` config with fields changed, or left out where the change is `...`."""
    from flexgen.spec.load import load_spec

    config = copy.deepcopy(load_spec(root("specs") / f"{spec}.yaml").model.tiny) | changes
    return {key: value for key, value in config.items() if value is not ...}


@cache
def saved(spec: str) -> tuple[Any, Path]:
    """The spec's tiny model and a directory that transformers saved it to."""
    model = reference(tiny_config(spec))
    folder = Path(tempfile.mkdtemp(prefix=f"flexgen-{spec}-"))
    save(model, folder)
    return model, folder


def prompt(length: int, seed: int = 7) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 211, (length,), generator=generator).tolist()


def dump(config: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
