"""The tables by slot, as a step reads them at its beginning and writes them at its end.

last_S (S,) int64 holds each slot's last token and length_S (S,) int64 its tokens, the last one included.

Shape suffixes: S slots, R rows, B blocks of a block table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexgen.contract.abi import PAD_SLOT


def rows(slots_R: Tensor, last_S: Tensor, length_S: Tensor) -> tuple[Tensor, ...]:
    """A decode step's ids (R,) int64, positions (R,) int64, and `Step`'s rows_T, starts_R and lengths_R."""
    if slots_R.is_cuda:
        from flexgen.runtime.execution import tables_kernel as slots  # Triton is there where CUDA is

        return slots.rows(slots_R, last_S, length_S)
    lengths_R = length_S[slots_R]
    rows_R, starts_R = (torch.arange(len(slots_R) + more, dtype=torch.int32, device=slots_R.device) for more in (0, 1))
    return last_S[slots_R], lengths_R - 1, rows_R, starts_R, lengths_R.int()


def places(slots_R: Tensor, length_S: Tensor, blocks_SB: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Each slot's block table (R, B), and where its last token lies among all pages' tokens, (R,) int64."""
    if slots_R.is_cuda:
        from flexgen.runtime.execution import tables_kernel as slots

        return slots.places(slots_R, length_S, blocks_SB, page_size)
    table_RB, positions_R = blocks_SB[slots_R], length_S[slots_R] - 1
    page_R = table_RB.gather(1, (positions_R // page_size)[:, None])[:, 0]
    return table_RB, page_R.long() * page_size + positions_R % page_size


def advance(slots_R: Tensor, tokens_R: Tensor, last_S: Tensor, length_S: Tensor) -> None:
    """Append each slot's token. The slot of padding rows keeps one token, 0."""
    if slots_R.is_cuda:
        from flexgen.runtime.execution import tables_kernel as slots

        return slots.advance(slots_R, tokens_R, last_S, length_S, PAD_SLOT)
    live_R = slots_R != PAD_SLOT
    last_S[slots_R] = torch.where(live_R, tokens_R, 0)
    length_S[slots_R] = torch.where(live_R, length_S[slots_R] + 1, 1)
