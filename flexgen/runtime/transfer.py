"""Small copies between host and device that never make the host wait for the device's queue."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Sequence, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A device tensor of `values`, copied in stream order (from pinned memory on CUDA)."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


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
