"""Ropes of the new families that their tiny models alone do not show."""


from __future__ import annotations

import pytest
import torch

from flexgen.errors import ConfigError
from flexgen.runtime.loading.rope import Rope


def test_longrope_takes_the_factors_of_the_engines_length():
    table = {"rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}
    rope = Rope.bind(table | {"original_max_position_embeddings": 8}, types=("longrope",), head_dim=4, max_position=32)
    short, long = (rope.tables(length, torch.float32, "cpu")[1][1] for length in (8, 9))
    assert not torch.allclose(short, long)
    assert torch.allclose(long[0], torch.tensor(1 / 3).sin() * (1 + torch.tensor(4.0).log() / torch.tensor(8.0).log()).sqrt())


def test_dynamic_ropes_are_refused_by_name():
    with pytest.raises(ConfigError, match="'dynamic', which is not implemented"):
        Rope.bind({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, types=("default",), head_dim=4, max_position=8)
