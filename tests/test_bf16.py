"""16-bit arithmetic: ours moves no model further from its fp32 self than transformers' own does."""

from __future__ import annotations

import pytest
import torch
from tiny import SOME, prompt, reference, tiny_config

from flexgen.runtime.loading.model import Model
from flexgen.verify.precision import LIMIT, rounding
from flexgen.verify.reference import load, save


@pytest.mark.parametrize("spec", SOME)
def test_bf16_error_is_at_most_that_of_transformers(spec, tmp_path):
    save(reference(tiny_config(spec)).bfloat16(), tmp_path)
    exact, rounded = (load(tmp_path, "cpu", dtype) for dtype in (torch.float32, torch.bfloat16))
    model = Model.load(tmp_path, dtype="bfloat16", device="cpu")
    measured = rounding(model, exact, rounded, [prompt(128, seed) for seed in range(16)], prefill=112)
    print(spec, measured)
    assert measured.positions >= 2000
    assert 0 < measured.ours <= LIMIT * measured.theirs
    assert measured.our_flips <= LIMIT * measured.their_flips
