"""A model as the engine uses it. `loading.model.Model` is one; every room that takes a model names this."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from flexgen.contract.abi import Layer, Step
from flexgen.contract.state import State


class Dims(Protocol):
    """What the engine reads of a package's `Dims`; generated code reads the rest."""

    @property
    def vocab(self) -> int: ...


class ServedModel(Protocol):
    """One copy of the weights, and the forward pass that reads them.

    config     config.json as one flat mapping of the text model
    layers     one `Layer` a layer, to which the engine binds pages and state; `weights` is what lies outside of layers
    mixers     per layer, the entries that keep state; `state` says what each keeps
    routers    per layer, where each router leaves a token's experts on request, and how many it chooses
    head_dtype that of logits, where it is not the model's
    weight_version  rises with every update of the weights
    missing_weights  names of tensors without which the weights are a mixture of an old and a new model
    """

    config: dict[str, Any]
    directory: Path | None
    device: torch.device
    dtype: torch.dtype
    head_dtype: torch.dtype | None
    weight_version: int
    missing_weights: set[str]
    load_seconds: float
    weights: Layer
    layers: list[Layer]
    mixers: list[tuple[str, ...]]
    state: dict[str, State]
    routers: list[dict[str, int]]

    @property
    def dims(self) -> Dims: ...

    def make_rope_tables(self, length: int) -> None:
        """Make rotary tables for positions below `length`."""

    def forward(self, ids_T: Tensor, step: Step) -> Tensor:
        """Token ids (T,) -> hidden states (T, D) after the final norm; writes K/V pages and state."""

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Hidden states (R, D) -> logits (R, V)."""
