"""Copies between host and device: small ones that never make the host wait for the device's queue, and whole weights.

Steps upload and download through it, loading stages weights.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from itertools import cycle

import numpy as np
import torch
from torch import Tensor


def upload(values: Sequence | np.ndarray, device: torch.device, dtype: type = np.int64) -> Tensor:
    """A device tensor of `values`, copied in stream order (from pinned memory on CUDA)."""
    host = torch.from_numpy(np.array(values, dtype))  # torch.tensor(values) takes several times as long
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


class Staging:
    """Copies weights to a device. To CUDA they go through two pinned buffers in turn, so that reading a part from its file
    overlaps with the copy of the part before; casts and transpositions happen on the device.
    """

    def __init__(self, device: torch.device, size: int = 2**26) -> None:
        self._device, self._size = device, size
        if device.type == "cuda":
            buffers = [(torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()) for _ in range(2)]
            self._buffers = cycle(buffers)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """`target.copy_(source)`, in stream order."""
        if self._device.type != "cuda":
            target.copy_(source)
            return
        for into, part in slices(target, source, self._size):
            if part.nbytes > self._size:
                into.copy_(part)
                continue
            buffer, copied = next(self._buffers)
            copied.synchronize()
            staged = buffer[: part.nbytes].view(part.dtype).view(part.shape).copy_(part)
            into.copy_(staged.to(self._device, non_blocking=True))
            copied.record()


def slices(target: Tensor, source: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Both cut along dim 0 into parts of at most `size` bytes of the source, or of one row where that is more."""
    if source.dim() == 0:
        return iter([(target, source)])
    rows = max(1, size // max(1, source[:1].nbytes))
    return zip(target.split(rows), source.split(rows), strict=True)


class Download:
    """Host copies of device tensors, started at once and waited for only when they are read."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self._event: torch.cuda.Event | None = None
        self._copies = [None if tensor is None else self._start(tensor) for tensor in tensors]
        if self._event is not None:
            self._event.record()

    def _start(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cuda":
            return tensor.clone()
        self._event = self._event or torch.cuda.Event()
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return copy.copy_(tensor, non_blocking=True)

    def read(self) -> list[list | None]:
        """The values as nested lists, once they have arrived."""
        return [None if copy is None else copy.tolist() for copy in self.wait()]

    def wait(self) -> list[Tensor | None]:
        """The host copies themselves, once they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._copies


def memory_bytes(device: torch.device) -> int:
    """All memory that a device has: a GPU's own, or the host's. Tensors on `meta` take none."""
    if device.type == "meta":
        return sys.maxsize
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
