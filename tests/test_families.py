"""Ropes of the new families that their tiny models alone do not show."""


from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from tiny import expected, prompt, reference, tiny_config

from flexgen.errors import ConfigError
from flexgen.runtime.loading.model import Model
from flexgen.runtime.loading.rope import Rope
from flexgen.verify.harness import Harness


def test_longrope_takes_the_factors_of_the_engines_length():
    table = {"rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}
    rope = Rope.bind(table | {"original_max_position_embeddings": 8}, types=("longrope",), head_dim=4, max_position=32)
    short, long = (rope.tables(length, torch.float32, "cpu")[1][1] for length in (8, 9))
    assert not torch.allclose(short, long)
    assert torch.allclose(long[0], torch.tensor(1 / 3).sin() * (1 + torch.tensor(4.0).log() / torch.tensor(8.0).log()).sqrt())


def test_longrope_with_factors_of_its_own_for_cos_and_sin():
    """Phi 3.5 MoE: transformers' class of it, at a length that short factors serve."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "short_mscale": 1.2,
            "long_mscale": 1.3, "original_max_position_embeddings": 64}  # fmt: skip
    raw = tiny_config("phimoe", rope_parameters=rope, max_position_embeddings=256)
    oracle = reference(raw)
    folder = Path(tempfile.mkdtemp(prefix="flexgen-phimoe-"))
    oracle.save_pretrained(folder)
    model = Model.load(folder, dtype="float32", device="cpu")
    got = Harness(model, length=64).feed({0: prompt(40)})[0]
    assert (got - expected(oracle, prompt(40))).abs().max() < 1e-4
    table = model.dims.rope
    long, short = (table.tables(length, torch.float32, "cpu")[0][0, 0].item() for length in (65, 64))
    assert (long, short) == pytest.approx((1.3, 1.2))


def test_dynamic_ropes_are_refused_by_name():
    with pytest.raises(ConfigError, match="'dynamic', which is not implemented"):
        Rope.bind({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, types=("default",), head_dim=4, max_position=8)
