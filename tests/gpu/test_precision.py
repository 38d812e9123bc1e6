"""The error of bf16 on a CUDA device at real shapes of reduced depth, against transformers' own."""

import json

import pytest
import torch

from flexgen.bench.shapes import LOADING, SHAPES, shape
from flexgen.runtime.loading.model import Model
from flexgen.verify import reference
from flexgen.verify.precision import LIMIT, rounding

LAYERS = {"gemma4-26b-a4b": 6, "qwen3.6-35b-a3b": 4, "qwen3.6-35b-a3b-bf16-state": 4}
"""So many that every kind of layer is there; 2 else."""


@pytest.mark.parametrize("name", SHAPES)
def test_bf16_is_as_close_to_fp32_as_transformers_is(name, tmp_path):
    config = json.loads(json.dumps(shape(name, LAYERS.get(name, 2))))
    with torch.device("cuda"):
        reference.save(reference.tiny(config).bfloat16(), tmp_path)
    torch.cuda.empty_cache()
    exact, rounded = (reference.load(tmp_path, "cuda", dtype) for dtype in (torch.float32, torch.bfloat16))
    model = Model.load(tmp_path, dtype="bfloat16", device="cuda", **LOADING.get(name, {}))
    draw = torch.Generator().manual_seed(0)
    sequences = torch.randint(1, config["vocab_size"], (16, 128), generator=draw).tolist()
    found = rounding(model, exact, rounded, sequences, prefill=64)
    assert found.positions >= 2000 and found.ratio <= LIMIT, str(found)
