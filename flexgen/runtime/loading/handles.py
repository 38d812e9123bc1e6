"""Weights of another process of this machine by handle: CUDA IPC for tensors of a GPU, which are not copied, shared memory for others.

    trainer   sent.put(weight_handles(model.state_dict().items()))        # bytes, over any pipe or queue
    engine    llm.load_weights(open_handles(sent.get()))

Handles are pickled: open those of a process that is trusted. The trainer's tensors stay as they are until the engine has read them.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from multiprocessing.reduction import ForkingPickler

import torch.multiprocessing  # teaches ForkingPickler to send tensors as handles
from torch import Tensor

from flexgen.runtime.loading.updates import distinct

__all__ = ["open_handles", "weight_handles"]


@torch.no_grad()
def weight_handles(weights: Iterable[tuple[str, Tensor]]) -> bytes:
    """Handles of (Hugging Face name, tensor). A tied pair is one tensor, and goes once.

    Each is opened once, while this process lives. Raises UpdateError for a tensor that cannot be read.
    """
    pairs = [(name, tensor.detach()) for name, tensor in distinct(weights)]
    shared = [(name, tensor if tensor.is_cuda else tensor.clone()) for name, tensor in pairs]  # sharing moves a host's tensor
    return bytes(ForkingPickler.dumps(shared))


def open_handles(handles: bytes) -> list[tuple[str, Tensor]]:
    """What `weight_handles` of another process gave, as a source for `load_weights`: the tensors themselves, on their device."""
    return pickle.loads(handles)
