"""Triton compiles a kernel when it is first launched. Here all that steps launch are, while the layers are compiled."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from copy import copy
from typing import Any

import torch

from flexgen.contract.abi import PAD_SLOT
from flexgen.runtime.execution.packed import Piece
from flexgen.runtime.sampling.sampler import Features


def of_each_kind(model: Any) -> Any:
    """The model cut down to the first layer of each kind, as it is written; it shares weights, pages and state."""
    small, walker = copy(model), model.package.walker
    firsts = {kind: model.dims.kinds.index(kind) for kind in dict.fromkeys(model.dims.kinds)}
    layers, run = [model.layers[index] for index in firsts.values()], [walker.LAYERS[kind] for kind in firsts]
    small.walker = walker.Walker(model.dims, model.weights, layers, run)
    return small


def rehearse(
    runner: Any,
    sizes: Sequence[int],
    features: Sequence[Features],
    prompts: Sequence[tuple[int, int]],
    inference: bool,
) -> None:
    """Decode steps of each of `sizes` rows, and steps with `prompts`, (rows, tokens of each), all on the pad slot.

    For a thread of its own, with a copy of the runner. `inference`: the tables were made in torch's inference mode.
    """
    device = runner.last_S.device
    runner.model = of_each_kind(runner.model)
    on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with on_device, torch.inference_mode(inference), torch.no_grad():
        for size in sizes:
            slots_R = torch.full((size,), PAD_SLOT, device=device)
            logits_RV = runner.decode_logits(slots_R)
            for each in features:
                runner.draw(logits_RV, slots_R, each)
        for rows, tokens in prompts:
            runner.forward_pieces([Piece(PAD_SLOT, 0, (0,) * tokens)] * rows)
