"""Low-rank updates that each token brings along: `Adapted` is a weight that `project` and `experts` multiply with them.

An update lies in an entry of two tables, A and B, and every token has the index of its entry, or -1 for none. A token without one
gets zeros, so that its row is that of the weight alone.

Shape suffixes: T tokens, M rows (a token each, or a route of a token), I input features, O output features, P parts of a
weight (q, k, v), R rank of the tables, N entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen.runtime.ops.library import define_op

_GATHERED = 512
"""Rows up to which the kernels for decode run; beyond, products with all entries cost less than to read one for each row."""


@dataclass(eq=False)
class Adapted:
    """A weight with room for the updates of some adapters, all in the weight's dtype. `project` and `experts` take it as they take
    a tensor.

    weight   (O, I), or (E, ...) of experts
    a, b     (S, P R, I) and (S, O, R), a slot each, with the adapter's scale in b; of experts (S, E, R, I) and (S, E, O, R)
    slots_T  the slot of each token of the step, of the head each row of logits, 1 to S, or 0 for none; at least as long as any step
    rows     how many of the O rows belong to each part
    """

    weight: Tensor
    a: Tensor
    b: Tensor
    slots_T: Tensor
    rows: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """That of the weight and the tables."""
        return self.weight.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tables."""
        return self.a.nbytes + self.b.nbytes

    def delta(self, x_TI: Tensor) -> Tensor:
        """What the updates of each token add to its row, (T, O)."""
        return lora(x_TI, self.a, self.b, self.slots_T[: x_TI.shape[0]] - 1, self.rows)

    def delta_of_ids(self, ids_T: Tensor) -> Tensor:
        """What the updates of each token add to the row of its id, (T, I)."""
        slots_T = self.slots_T[: len(ids_T)]
        own_TS = slots_T[:, None] == torch.arange(1, len(self.a) + 1, device=ids_T.device)
        h_TR = self.b[(slots_T - 1).clamp(min=0), ids_T]
        return (own_TS[:, :, None] * h_TR[:, None]).flatten(1) @ self.a.flatten(0, 1)


def lora(x_TI: Tensor, a_NQI: Tensor, b_NOR: Tensor, index_M: Tensor, rows: Sequence[int], choices: int = 1) -> Tensor:
    """x A^T B^T with the entry of each row, part by part: (M, O) in x's dtype; zeros where the index is -1.

    a_NQI: the parts' A end to end, P R rows. choices: rows of each token, M / T.
    """
    return torch.ops.flexgen.lora(x_TI, a_NQI, b_NOR, index_M, list(rows), choices)


def lora_loop(x_TI: Tensor, a_NQI: Tensor, b_NOR: Tensor, index_M: Tensor, rows: Sequence[int], choices: int) -> Tensor:
    """The reference: an entry at a time. Waits for the device."""
    out_MO = x_TI.new_zeros((len(index_M), b_NOR.shape[1]))
    for entry in index_M.unique().tolist():
        if entry < 0:
            continue
        (row,) = torch.where(index_M == entry)
        h_mPR = F.linear(x_TI[row // choices], a_NQI[entry]).unflatten(-1, (len(rows), -1))
        parts = b_NOR[entry].split(list(rows))
        out_MO[row] = torch.cat([F.linear(h_mPR[:, place], part) for place, part in enumerate(parts)], dim=-1)
    return out_MO


def lora_masked(x_TI: Tensor, a_NQI: Tensor, b_NOR: Tensor, index_T: Tensor, rows: Sequence[int]) -> Tensor:
    """The same for many tokens and few entries: products with all entries, of which each token keeps its own."""
    entries, rank = len(a_NQI), b_NOR.shape[2]
    own_TN = index_T[:, None] == torch.arange(entries, device=x_TI.device)
    h_TNPR = F.linear(x_TI, a_NQI.flatten(0, 1)).view(-1, entries, len(rows), rank)
    h_TNPR = h_TNPR * own_TN[:, :, None, None]
    parts = b_NOR.split(list(rows), dim=1)
    made = [h_TNPR[:, :, place].flatten(1) @ part.transpose(1, 2).flatten(0, 1) for place, part in enumerate(parts)]
    return torch.cat(made, dim=-1)


def lora_grouped(x_TI: Tensor, a_NQI: Tensor, b_NOR: Tensor, index_M: Tensor, choices: int) -> Tensor:
    """The same for many rows and many entries, of weights of one part: rows sorted by entry, and two grouped products."""
    entries = len(a_NQI)
    key_M = torch.where(index_M < 0, entries, index_M)
    sorted_M, order_M = key_M.to(torch.int32).sort(stable=True)
    every_N = torch.arange(entries, dtype=torch.int32, device=x_TI.device)
    offsets_N = torch.searchsorted(sorted_M, every_N, right=True, out_int32=True)
    h_MR = F.grouped_mm(x_TI[order_M // choices], a_NQI.transpose(1, 2), offs=offsets_N)
    y_MO = F.grouped_mm(h_MR, b_NOR.transpose(1, 2), offs=offsets_N)
    y_MO = torch.where((sorted_M < entries)[:, None], y_MO, torch.zeros_like(y_MO))  # no group wrote the others
    return torch.empty_like(y_MO).index_copy(0, order_M, y_MO)


def _lora_cpu(x_TI: Tensor, a_NQI: Tensor, b_NOR: Tensor, index_M: Tensor, rows: Sequence[int], choices: int) -> Tensor:
    return lora_loop(x_TI, a_NQI, b_NOR, index_M, rows, choices)


def _lora_cuda(x_TI: Tensor, a_NQI: Tensor, b_NOR: Tensor, index_M: Tensor, rows: Sequence[int], choices: int) -> Tensor:
    from flexgen.runtime.ops.kernels.lora import lora_gathered  # Triton is there where CUDA is

    if len(index_M) > _GATHERED and choices == 1:
        return lora_masked(x_TI, a_NQI, b_NOR, index_M, rows)
    if len(index_M) > _GATHERED and len(rows) == 1 and _serves_grouped(x_TI, a_NQI, b_NOR):
        return lora_grouped(x_TI, a_NQI, b_NOR, index_M, choices)
    return lora_gathered(x_TI, a_NQI, b_NOR, index_M, rows, choices)


def _serves_grouped(x_TI: Tensor, a_NQI: Tensor, b_NOR: Tensor) -> bool:
    """bf16, and strides of 16 bytes, which grouped_mm wants."""
    strides = (x_TI.shape[1], a_NQI.shape[1], b_NOR.shape[1], b_NOR.shape[2])
    return x_TI.dtype == torch.bfloat16 and all(stride % 8 == 0 for stride in strides)


def _lora_fake(x_TI: Tensor, a_NQI: Tensor, b_NOR: Tensor, index_M: Tensor, rows: Sequence[int], choices: int) -> Tensor:
    return x_TI.new_empty((index_M.shape[0], b_NOR.shape[1]))


define_op("lora", cpu=_lora_cpu, cuda=_lora_cuda, fake=_lora_fake)
