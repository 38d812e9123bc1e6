"""MXFP4 weights against transformers' own dequantisation, bit for bit."""

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from flexgen.runtime.errors import ConfigError
from flexgen.runtime.mxfp4 import dequantise


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equals_theirs_for_every_code_and_scale(dtype):
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (3, 20, 4, 16), dtype=torch.uint8)
    scales = torch.randint(0, 256, (3, 20, 4), dtype=torch.uint8)
    blocks[0].flatten()[:256] = torch.arange(256, dtype=torch.uint8)
    ours = dequantise(blocks, scales, dtype)
    assert ours.shape == (3, 128, 20) and ours.is_contiguous() and ours.dtype == dtype
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_a_known_value():
    blocks = torch.zeros(1, 1, 1, 16, dtype=torch.uint8)
    blocks[0, 0, 0, 0] = 0xF3
    values = dequantise(blocks, torch.tensor([[[128]]], dtype=torch.uint8), torch.float32)
    assert values[0, :3, 0].tolist() == [3.0, -12.0, 0.0]


def test_refuses_blocks_and_scales_that_do_not_belong_together():
    blocks = torch.zeros(2, 8, 4, 16, dtype=torch.uint8)
    with pytest.raises(ConfigError, match=r"\(2, 8, 4, 16\).*\(2, 8, 3\)"):
        dequantise(blocks, torch.zeros(2, 8, 3, dtype=torch.uint8), torch.float32)
