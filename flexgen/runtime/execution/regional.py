"""Regional compilation: one compiled function a layer kind, reused at every depth and batch size. `start` compiles with it.

A layer function sees tensors, numbers and plain attributes, never its index, so all layers of a kind share one piece of
compiled code. Sizes that change from step to step (tokens, rows, blocks of a table) are symbols in it; a step of one token
is a variant of its own. More than VARIANTS are a defect and raise.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from threading import Thread
from types import FunctionType
from typing import Any

import torch
import torch.fx.experimental._config
from torch import Tensor

from flexgen.contract.abi import Step
from flexgen.runtime.loading.model import Model

VARIANTS = 4
"""Most variants of one function. It takes two, one token and more; the rest is for what a later torch may tell apart."""


class Regional:
    """One function and its compiled variants. The first dim of every tensor argument is a symbol.

    The code object is a copy, so that engines of other sizes in the same process do not count against this one.
    """

    def __init__(self, function: Callable[..., Any], backend: str = "inductor") -> None:
        code = function.__code__
        own = FunctionType(code.replace(co_name=code.co_name), function.__globals__, code.co_name, function.__defaults__)
        own.__kwdefaults__ = function.__kwdefaults__
        options = chained() if backend == "inductor" else None
        self._run = torch.compile(own, fullgraph=True, backend=backend, options=options)

    def __call__(self, *args: Any) -> Any:
        for arg in args:
            if isinstance(arg, Tensor):
                torch._dynamo.maybe_mark_dynamic(arg, 0)
        return self._run(*args)


@cache
def prepare() -> Thread:
    """Begin to start the compiler's worker processes in the background, which takes as long as to compile a layer."""
    from torch._inductor.async_compile import AsyncCompile  # only where something is compiled
    from torch._inductor.codecache import torch_key
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    # Inductor sets it when it first compiles, and Triton reads it each time: kernels from before would be in another place.
    os.environ.setdefault("TRITON_CACHE_DIR", triton_cache_dir(torch.cuda.current_device()))

    def start() -> None:
        AsyncCompile.warm_pool()
        AsyncCompile.wakeup()
        torch_key()  # reads torch's own files

    thread = Thread(target=start, name="flexgen-compiler", daemon=True)
    thread.start()
    return thread


def chained() -> dict[str, Any]:
    """Options that make the compiler's kernels begin while the one before them still runs, as `kernels/launch` describes.

    Each then waits ahead of its first access. Inductor leaves that out where the node before writes nothing it reads, but
    such a node may have no kernel of its own, and the kernel before it still runs. The change holds for the whole process,
    and for nothing that is compiled without this option.

    Blocks are not tuned: kernels of other sizes run beside the tuning, and their sizes here are not those to come.
    """
    from torch._inductor.codegen.triton import TritonKernel  # only where something is compiled

    def wait(kernel: Any, before: Any, *_: Any, consider_reads: bool = False) -> None:
        if kernel._enable_pdl_codegen():
            looped = kernel.inside_reduction and kernel.range_trees[-1].is_loop
            (kernel.body if looped else before).writeline(kernel.GDC_WAIT)

    TritonKernel._handle_pdl_before_access = wait  # type: ignore[method-assign]
    return {"triton.enable_pdl": True, "triton.autotune_pointwise": False}


def compile_layers(model: Model, backend: str = "inductor") -> None:
    """Make the walker run compiled layers. Raises later, when a layer needs more variants than it may have."""
    if backend == "inductor":
        prepare().join()
    torch._dynamo.config.recompile_limit = VARIANTS
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    compiled = {kind: Regional(model.package.walker.LAYERS[kind], backend) for kind in dict.fromkeys(model.dims.kinds)}
    model.walker.run = [compiled[kind] for kind in model.dims.kinds]


def unrelated_sizes() -> AbstractContextManager:
    """While this holds, two sizes that happen to be equal when a layer is compiled stay two symbols."""
    return torch.fx.experimental._config.patch(use_duck_shape=False)  # type: ignore[attr-defined]


def mark_sizes(step: Step) -> Step:
    """Mark the sizes of a step that may be others in the next one."""
    for tensor in (step.positions_T, step.rows_T, step.starts_R, step.lengths_R, step.state_R):
        if tensor is not None:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
    for pages in step.pages.values():
        torch._dynamo.maybe_mark_dynamic(pages.slots_T, 0)
        torch._dynamo.maybe_mark_dynamic(pages.table_RB, (0, 1))
        if pages.split is not None:
            torch._dynamo.maybe_mark_dynamic(pages.split, 0)
    return step
