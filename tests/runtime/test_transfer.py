"""Weights on their way to a device: the parts that are staged, put together, are the whole."""

import numpy as np
import pytest
import torch

from flexgen.runtime.transfer import Staging, slices, upload

SOURCES = {
    "matrix": torch.randn(13, 7),
    "rows beyond a part": torch.randn(3, 40),
    "vector": torch.randn(50).bfloat16(),
    "one number": torch.randn(1),
    "a scalar": torch.randn(()),
    "experts": torch.randn(5, 4, 3),
    "nothing": torch.randn(0, 4),
}


@pytest.mark.parametrize("size", [1, 32, 100, 2**20])
@pytest.mark.parametrize("name", SOURCES)
def test_slices_cover_a_tensor_and_stay_below_the_size(name, size):
    source = SOURCES[name]
    target = torch.full(source.shape, float("nan"))
    for into, part in slices(target, source, size):
        assert part.nbytes <= max(size, source[:1].nbytes if source.dim() else source.nbytes)
        into.copy_(part)
    assert torch.equal(target, source.float())


def test_slices_of_a_transposed_target_write_its_storage():
    source, storage = torch.randn(5, 4, 3), torch.full((5, 3, 4), float("nan"))
    for into, part in slices(storage.transpose(1, 2), source, 100):
        into.copy_(part)
    assert torch.equal(storage, source.transpose(1, 2))


def test_a_host_copies_at_once():
    target = torch.empty(13, 7, dtype=torch.bfloat16)
    Staging(torch.device("cpu")).copy(target, SOURCES["matrix"])
    assert torch.equal(target, SOURCES["matrix"].bfloat16())


@pytest.mark.parametrize("values", [[], [3, -1], (2**63 - 1,), range(5), [(1, 2), (3, 4)], np.arange(6).reshape(2, 3)])
def test_an_upload_is_a_tensor_of_its_own(values):
    uploaded = upload(values, torch.device("cpu"))
    assert uploaded.dtype == torch.int64 and torch.equal(uploaded, torch.tensor(np.array(values), dtype=torch.int64))
    if isinstance(values, np.ndarray):
        values += 1
        assert torch.equal(uploaded, torch.arange(6).view(2, 3))


def test_numbers_are_rounded_as_torch_rounds_them():
    numbers = [0.1, 1 / 3, 1e-45, 2.0**127, float("-inf")]
    assert torch.equal(upload(numbers, torch.device("cpu"), np.float32), torch.tensor(numbers))
