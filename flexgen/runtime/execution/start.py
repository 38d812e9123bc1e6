"""What happens to a step before the first request: layers and kernels are compiled, and graphs captured.

The engine calls `start` once, on a CUDA device. Triton compiles a kernel when it is first launched; `rehearse` launches all
that steps need, in a thread of its own while the layers are compiled.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from typing import cast

import torch

from flexgen.contract.abi import PAD_SLOT
from flexgen.runtime.execution.graphs import Graphs, packed_shapes
from flexgen.runtime.execution.packed import Piece, Shape
from flexgen.runtime.execution.regional import compile_layers, mark_sizes, prepare, unrelated_sizes
from flexgen.runtime.execution.step import DeviceStep
from flexgen.runtime.loading.model import Model
from flexgen.runtime.ops.expert_backends import ROUTED_TOKENS
from flexgen.runtime.options import EngineOptions
from flexgen.runtime.sampling.sampler import Features

CAPTURED = (Features(), Features(random=True))
"""How tokens are drawn by the graphs that are captured at start."""

_TYPICAL_ROWS = 16
"""Rows for which the compiler sizes the blocks of its kernels, which then run any number but 1."""

_SHORT_PROMPT, _LONG_PROMPT = 4, 64
"""Tokens of prompts that are rehearsed."""


def start(step: DeviceStep, options: EngineOptions, seconds: dict[str, float]) -> Graphs:
    """Compile and capture, and print how long each phase took; `seconds` has those before, and takes these."""
    sizes, begun = options.capture_sizes, time.perf_counter()
    compile_step(step, options, () if options.lazy_capture else sizes)
    torch.cuda.synchronize(step.device)
    seconds["compile"], begun = time.perf_counter() - begun, time.perf_counter()
    graphs = capture(step, options, sizes, at_start=not options.lazy_capture)
    torch.cuda.synchronize(step.device)
    seconds["capture"] = time.perf_counter() - begun
    phases = ", ".join(f"{phase} {took:.1f} s" for phase, took in seconds.items())
    print(f"flexgen start-up: {phases}", file=sys.stderr, flush=True)
    return graphs


@torch.no_grad()
def compile_step(step: DeviceStep, options: EngineOptions, sizes: Sequence[int]) -> None:
    """Compile the layers for one token and for more.

    Meanwhile the kernels are compiled that decode of `sizes` rows launches, and steps with prompts, if there are sizes.
    """
    prompts = rehearsed_prompts(step, options) if sizes else ()
    if step.device.type == "cuda":
        prepare()  # it also says where kernels are cached, before the first is
    with ThreadPoolExecutor(1) as other:
        kernels = other.submit(rehearse, of_each_kind(step), sizes, prompts, torch.is_inference_mode_enabled())
        compile_layers(cast(Model, step.model))  # one without a package is never compiled
        step.mark = mark_sizes
        with unrelated_sizes():
            for rows in (1, max(2, min(_TYPICAL_ROWS, options.max_num_seqs))):
                step.decode_logits(torch.full((rows,), PAD_SLOT, device=step.device))
        kernels.result()
    step.cache.clear_state(torch.full((1,), PAD_SLOT, device=step.device))


@torch.no_grad()
def capture(step: DeviceStep, options: EngineOptions, sizes: Sequence[int], at_start: bool) -> Graphs:
    """Graphs of decode steps of `sizes` and of steps with prompts, all captured now, or each when it is first met."""
    graphs = Graphs(step, sizes, captured_shapes(step, options), options.max_model_len)
    if at_start:
        graphs.capture_all(CAPTURED)
    return graphs


def captured_shapes(step: DeviceStep, options: EngineOptions) -> list[Shape]:
    """The steps with prompts that graphs hold.

    Rows with recurrent state need slots of their own, and the loop over experts, which serves many tokens of any dtype
    but bf16, waits for the device.
    """
    tokens, rows = options.max_num_batched_tokens, options.max_num_seqs
    if any(step.model.routers) and step.model.dtype != torch.bfloat16:
        tokens = min(tokens, ROUTED_TOKENS)
    return packed_shapes(tokens, rows if step.recurrent else max(rows, 4), options.block_size)


def rehearsed_prompts(step: DeviceStep, options: EngineOptions) -> list[tuple[int, int]]:
    """(rows, tokens of each) of steps with prompts, short ones and long, few and many: each kind has kernels of its own."""
    room = options.max_num_batched_tokens - 1  # a padding token comes last
    long = min(_LONG_PROMPT, options.max_model_len, room)
    if not long:
        return []
    many = min(ROUTED_TOKENS // long + 1, room // long)  # beyond ROUTED_TOKENS experts take other kernels
    shapes = captured_shapes(step, options)
    return [*((shape.rows - 1, _SHORT_PROMPT) for shape in shapes), (1, long), (many, long)]


def of_each_kind(step: DeviceStep) -> DeviceStep:
    """A step over the same tables whose model is cut down to the first layer of each kind, as it is written."""
    model = cast(Model, step.model)
    small, walker = copy(model), model.package.walker
    firsts = {kind: model.dims.kinds.index(kind) for kind in dict.fromkeys(model.dims.kinds)}
    layers, run = [model.layers[index] for index in firsts.values()], [walker.LAYERS[kind] for kind in firsts]
    small.walker = walker.Walker(model.dims, model.weights, layers, run)
    return replace(step, model=small)


def rehearse(
    step: DeviceStep, sizes: Sequence[int], prompts: Sequence[tuple[int, int]], inference: bool
) -> None:
    """Decode steps of each of `sizes` rows, and steps with `prompts`, (rows, tokens of each), all on the pad slot.

    `inference`: the tables were made in torch's inference mode, which is a thread's own.
    """
    on_device = torch.cuda.device(step.device) if step.device.type == "cuda" else nullcontext()
    with on_device, torch.inference_mode(inference), torch.no_grad():
        for size in sizes:
            slots_R = torch.full((size,), PAD_SLOT, device=step.device)
            logits_RV = step.decode_logits(slots_R)
            for features in CAPTURED:
                step.draw(logits_RV, slots_R, features)
        for rows, tokens in prompts:
            step.pieces_hidden([Piece(PAD_SLOT, 0, (0,) * tokens)] * rows)
