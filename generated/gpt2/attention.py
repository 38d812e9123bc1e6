# Generated from specs/gpt2.yaml. Do not edit: change the spec or the templates,
# then run `flexgen build specs/gpt2.yaml`.
"""How tokens of gpt2 see each other: for each attention its weights and its function.

T tokens   D model width   N query heads   K key/value heads   H head width
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexgen.contract import weights
from flexgen.contract.abi import Layer, Step
from flexgen.contract.state import Pages, State
from flexgen.runtime.ops.attention import attend, write_pages
from flexgen.runtime.ops.elementwise import project

if TYPE_CHECKING:
    from .walker import Dims


def attention_weights(dims: Dims) -> list[weights.Weight]:
    # spec: attention.attention
    return [
        *weights.linear("qkv", {
            "attn.c_attn": weights.packed(
                dims.heads * dims.head_dim, dims.heads * dims.head_dim, dims.heads * dims.head_dim),
        }, dims.hidden, out="heads", bias=True, transposed=True),
        *weights.linear("o", {"attn.c_proj": dims.hidden}, dims.heads * dims.head_dim,
            into="heads", bias=True, transposed=True),
    ]


def attention_attention(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    # spec: attention.attention
    pages = step.pages["attention"]
    heads_TNH = project(x_TD, w.qkv.t(), w.qkv_bias).unflatten(-1, (-1, dims.head_dim))
    q_TNH, k_TKH, v_TKH = heads_TNH.split((dims.heads, dims.heads, dims.heads), dim=1)
    write_pages(w, k_TKH, v_TKH, pages)  # writes K/V pages
    o_TNH = attend(q_TNH, w, pages, step, scale=dims.head_dim ** -0.5)  # reads K/V pages
    return project(o_TNH.flatten(1), w.o.t(), w.o_bias)


def state(dims: Dims) -> dict[str, State]:
    """What a layer of each entry keeps from step to step."""
    return {"attention": Pages(dims.heads, dims.head_dim)}


def rope_tables(dims: Dims, length: int, dtype: torch.dtype, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
    """cos and sin, each (length, rotated / 2), by attention entry."""
    return {}
