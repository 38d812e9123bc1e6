"""What a config.json may not say of a model, though each of its fields is right alone. `Model` asks before it allocates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch

from flexgen.contract.json_files import shown
from flexgen.contract.state import Pages, SharedPages, State
from flexgen.contract.weights import Weight
from flexgen.errors import ConfigError
from flexgen.runtime.transfer import memory_bytes


def check_state(mixers: Sequence[Sequence[str]], state: Mapping[str, State]) -> None:
    """Windows hold a token at least, and pages that a layer shares are those of an earlier one."""
    earlier: set[str] = set()
    for index, entries in enumerate(mixers):
        for entry in entries:
            kept = state[entry]
            if isinstance(kept, Pages) and kept.window is not None and kept.window < 1:
                raise ConfigError(f"{entry} layers have a window of {kept.window} tokens, and need at least 1")
            if isinstance(kept, SharedPages) and kept.owner not in earlier:
                raise ConfigError(
                    f"layer {index} reads the keys and values of an earlier {kept.owner} layer, and there is none; "
                    "config.json shares too many layers"
                )
        earlier.update(entries)


def check_sizes(kind: str, weights: Sequence[Weight], routers: Mapping[str, int]) -> None:
    """No size is less than 1, and routers choose no more experts than there are. `kind`: whose weights they are."""
    for weight in weights:
        if weight.present and not all(isinstance(size, int) and size >= 1 for size in weight.shape):
            shape = shown(" x ".join(map(str, weight.shape)))
            raise ConfigError(
                f"{weight.role} would be {shape} by config.json, and each size must be a whole number, no less than 1"
            )
    counts = [weight.shape[0] for weight in weights if weight.present and weight.layouts]
    for chosen in routers.values():
        if not 1 <= chosen <= min(counts):
            raise ConfigError(
                f"{kind} layers send each token to {chosen} of {min(counts)} experts by config.json, and must send "
                "it to at least 1 and at most all"
            )


def check_memory(tables: Sequence[Sequence[Weight]], dtype: torch.dtype, device: torch.device) -> None:
    """The weights of all layers fit the memory that there is, before any of it is taken."""
    weights = [weight for table in tables for weight in table if weight.present and weight.same_as is None]
    needed, memory = sum(prod(weight.shape) * (4 if weight.fp32 else dtype.itemsize) for weight in weights), memory_bytes(device)
    if needed > memory:
        raise ConfigError(f"the weights would take {needed} bytes by config.json, and {device} has {memory}")
