"""Weights from another process over torch.distributed: names first, then tensors in buckets. A trainer sends, an engine receives.

    trainer   send_weights(model.state_dict().items(), source=0, engine=1)
    engine    llm.receive_weights(source=0)

Both are in the process group, and run one call each. The engine checks all names, shapes and dtypes before a tensor is sent, and
says whether it takes them; the trainer raises where it does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flexgen.runtime.loading.updates import Entry, UpdateError, distinct

BUCKET_BYTES = 2**28
"""Most bytes that travel in one broadcast, unless a tensor alone has more."""

_ALIGNED = 16


@dataclass(frozen=True)
class Header:
    """One tensor to come."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in a bucket, the padding after them included."""
        count = torch.Size(self.shape).numel() * self.dtype.itemsize
        return -(-count // _ALIGNED) * _ALIGNED


def buckets(headers: Sequence[Header], most: int) -> Iterator[list[Header]]:
    """Tensors in their order, as many in a bucket as fit."""
    held: list[Header] = []
    for header in headers:
        if held and sum(each.nbytes for each in held) + header.nbytes > most:
            yield held
            held = []
        held.append(header)
    if held:
        yield held


@torch.no_grad()
def send_weights(
    weights: Iterable[tuple[str, Tensor]], *, source: int, engine: int, group: Any = None, bucket_bytes: int = BUCKET_BYTES
) -> int:
    """Broadcast (name, tensor) from this process, whose rank is `source`, to the engine's. -> tensors sent.

    A tied pair is one tensor, and is sent once. Raises UpdateError for what the engine does not take, and then nothing has been sent.
    """
    pairs = distinct(weights)
    headers = [Header(name, tuple(tensor.shape), tensor.dtype) for name, tensor in pairs]
    dist.broadcast_object_list([headers, bucket_bytes], src=source, group=group)
    answer: list[str | None] = [None]
    dist.broadcast_object_list(answer, src=engine, group=group)
    if answer[0]:
        raise UpdateError(f"the engine took none of {len(headers)} tensors: {answer[0]}")
    rest = iter(pairs)
    for bucket in buckets(headers, bucket_bytes):
        tensors = [next(rest)[1] for _ in bucket]
        flat = torch.zeros(sum(header.nbytes for header in bucket), dtype=torch.uint8, device=tensors[0].device)
        for view, tensor in zip(_views(flat, bucket), tensors):
            view.copy_(tensor)
        dist.broadcast(flat, src=source, group=group)
    return len(headers)


class Receiver:
    """The engine's end of one `send_weights`: entries whose tensors arrive in order as they are read."""

    def __init__(self, source: int, device: torch.device, group: Any = None) -> None:
        self.source, self.group, self.device = source, group, device
        sent: list[Any] = [None, None]
        dist.broadcast_object_list(sent, src=source, group=group)
        self.headers: list[Header] = sent[0]
        self._buckets = buckets(self.headers, sent[1])
        self._arrived: Iterator[Tensor] = iter(())
        self._read_so_far = 0
        self.going = False

    @property
    def entries(self) -> list[Entry]:
        """What is to come. Each is read once, in this order."""
        return [
            Entry(header.name, header.shape, header.dtype, partial(self._read, index)) for index, header in enumerate(self.headers)
        ]

    def answer(self, refusal: str | None) -> None:
        """Tell the sender to go on, or why not."""
        self.going = refusal is None
        dist.broadcast_object_list([refusal], src=dist.get_rank(), group=self.group)

    def drain(self) -> None:
        """Take part in what the sender still broadcasts, so that it does not wait for ever."""
        for bucket in self._buckets:
            self._receive(bucket)

    def _read(self, index: int) -> Tensor:
        if not self.going or index != self._read_so_far:
            raise UpdateError(f"{self.headers[index].name} would be read before it arrives: send one tensor of a tied pair")
        self._read_so_far += 1
        tensor = next(self._arrived, None)
        if tensor is None:
            self._arrived = iter(self._receive(next(self._buckets)))
            tensor = next(self._arrived)
        return tensor

    def _receive(self, bucket: Sequence[Header]) -> list[Tensor]:
        flat = torch.empty(sum(header.nbytes for header in bucket), dtype=torch.uint8, device=self.device)
        dist.broadcast(flat, src=self.source, group=self.group)
        return _views(flat, bucket)


def _views(flat: Tensor, bucket: Sequence[Header]) -> list[Tensor]:
    """The tensors of a bucket, in its bytes."""
    starts = [sum(header.nbytes for header in bucket[:index]) for index in range(len(bucket))]
    counts = [torch.Size(header.shape).numel() * header.dtype.itemsize for header in bucket]
    return [
        flat[start : start + count].view(header.dtype).view(header.shape) for header, start, count in zip(bucket, starts, counts)
    ]
