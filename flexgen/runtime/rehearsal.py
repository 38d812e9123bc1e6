"""Triton compiles a kernel when it is first launched. Here all that steps launch are, while the layers are compiled."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch

from flexgen.runtime.abi import PAD_SLOT
from flexgen.runtime.packed import Piece
from flexgen.runtime.sampler import Features


def of_each_kind(model: Any) -> Any:
    """The model cut down to the first layer of each kind, as it is written; it shares weights, pages and state."""
    small, walker = copy(model), model.package.walker
    firsts = {kind: model.dims.kinds.index(kind) for kind in dict.fromkeys(model.dims.kinds)}
    layers, run = [model.layers[index] for index in firsts.values()], [walker.LAYERS[kind] for kind in firsts]
    small.walker = walker.Walker(model.dims, model.weights, layers, run)
    return small


@torch.no_grad()
def rehearse(runner: Any, sizes: Sequence[int], features: Sequence[Features], counts: Sequence[int]) -> None:
    """Decode steps of each of `sizes` rows, and steps with `counts` prompts, all on the pad slot, by a runner that is no one else's."""
    device = runner.device
    runner.model = of_each_kind(runner.model)
    with torch.cuda.device(device) if device.type == "cuda" else torch.device(device):
        for size in sizes:
            slots_R = torch.full((size,), PAD_SLOT, device=device)
            logits_RV = runner.decode_logits(slots_R)
            for each in features:
                runner.draw(logits_RV, slots_R, each)
        for count in counts:
            runner.forward_pieces([Piece(PAD_SLOT, 0, (0,) * 4)] * count)
