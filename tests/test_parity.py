"""The truth test: generated code against transformers in fp32, for every spec, whole, in chunks and in decode."""

from __future__ import annotations

import pytest
import torch
from tiny import SPECS, expected, prompt, saved

from flexgen.runtime.loading.model import Model
from flexgen.verify.harness import Harness

TOLERANCE = {"qwen3_5": 1e-3, "qwen3_5_moe": 1e-3}
"""The delta rule: transformers' chunked form and a recurrence differ by this much."""


@pytest.mark.parametrize("spec", SPECS)
def test_logits_equal_transformers(spec):
    torch.set_num_threads(1)
    reference, folder = saved(spec)
    model = Model.load(folder, dtype="float32", device="cpu")
    assert model.package.folder.name == spec
    tokens = prompt(40)
    wanted = expected(reference, tokens)
    tolerance = TOLERANCE.get(spec, 1e-4)

    whole = Harness(model, page_size=16).feed({0: tokens})[0]
    assert (whole - wanted).abs().max() < tolerance

    harness = Harness(model, page_size=8)
    chunks = [harness.feed({1: tokens[a:b]})[1] for a, b in ((0, 1), (1, 17), (17, 20), (20, 40))]
    assert (torch.cat(chunks) - wanted).abs().max() < tolerance

    harness = Harness(model, page_size=8)
    other = prompt(23, seed=9)
    wanted_other = expected(reference, other)
    harness.feed({0: tokens[:30], 2: other[:13]})
    for i in range(10):
        got = harness.feed({2: other[13 + i : 14 + i], 0: tokens[30 + i : 31 + i]})
        assert (got[0][0] - wanted[30 + i]).abs().max() < tolerance
        assert (got[2][0] - wanted_other[13 + i]).abs().max() < tolerance


def test_fp32_head_on_request():
    _, folder = saved("llama")
    rounded, exact = (Model.load(folder, dtype="bfloat16", device="cpu", head_dtype=d) for d in (None, "float32"))
    tokens = prompt(12)
    got = [Harness(model, page_size=16).feed({0: tokens})[0] for model in (rounded, exact)]
    assert [logits.dtype for logits in got] == [torch.bfloat16, torch.float32]
    assert not torch.equal(got[0].float(), got[1])
    assert (got[0].float() - got[1]).abs().max() < 0.25
    tied = Model.load(saved("gemma4_moe")[1], dtype="bfloat16", device="cpu", head_dtype="float32")
    assert tied.weights.embed_tokens.dtype == torch.bfloat16
