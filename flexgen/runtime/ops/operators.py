"""Operators that the compiler takes as they are: one name, an implementation a device, and what the result looks like.

Registered on a library directly, since `torch.library.custom_op` spends tens of microseconds a call on checks that a step
of many small operators feels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_LIBRARY = torch.library.Library("flexgen", "FRAGMENT")


def operator(
    name: str,
    *,
    cpu: Callable[..., Any],
    cuda: Callable[..., Any],
    fake: Callable[..., Any],
    mutates: Sequence[str] = (),
) -> None:
    """Define `torch.ops.flexgen.NAME`. `cpu`'s annotations are its schema; `fake` gives results without their values."""
    _LIBRARY.define(name + torch.library.infer_schema(cpu, mutates_args=mutates))
    _LIBRARY.impl(name, cpu, "CPU")
    _LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"flexgen::{name}", fake, lib=_LIBRARY)
