"""What a decode step begins and ends with in Triton: a launch a page group, and two, in place of some twenty small ones.

`SlotTables` launches them on CUDA; each is what its method of that name promises.

Shape suffixes: S slots, R rows, B blocks of a block table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexgen.runtime.ops.kernels.launch import CHAIN, await_previous


@triton.jit
def _places_kernel(slots, length, blocks, table, places, blocks_s, COUNT: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
    """A row's block table, and where the token at its last position lies."""
    row = tl.program_id(0)
    await_previous()
    slot = tl.load(slots + row)
    mine = blocks + slot * blocks_s
    b = tl.arange(0, BLOCK)
    tl.store(table + row * COUNT + b, tl.load(mine + b, mask=b < COUNT), mask=b < COUNT)
    position = tl.load(length + slot) - 1
    tl.store(places + row, tl.load(mine + position // PAGE).to(tl.int64) * PAGE + position % PAGE)


@triton.jit
def _rows_kernel(slots, last, length, ids, positions, rows, starts, lengths):  # noqa: ANN001, ANN202
    row = tl.program_id(0)
    await_previous()
    slot = tl.load(slots + row)
    tokens = tl.load(length + slot)
    tl.store(ids + row, tl.load(last + slot))
    tl.store(positions + row, tokens - 1)
    tl.store(lengths + row, tokens.to(tl.int32))
    tl.store(rows + row, row)
    tl.store(starts + row, row)
    tl.store(starts + row + 1, row + 1)


@triton.jit
def _advance_kernel(slots, tokens, last, length, PAD: tl.constexpr):  # noqa: ANN001, ANN202
    row = tl.program_id(0)
    await_previous()
    slot = tl.load(slots + row)
    tl.store(last + slot, tl.where(slot == PAD, 0, tl.load(tokens + row)))
    tl.store(length + slot, tl.where(slot == PAD, 1, tl.load(length + slot) + 1))


def rows(slots_R: Tensor, last_S: Tensor, length_S: Tensor) -> tuple[Tensor, ...]:
    """What `SlotTables.rows` promises."""
    count = len(slots_R)
    ids_R, positions_R = (torch.empty_like(slots_R) for _ in range(2))
    rows_R, lengths_R, starts_R = (slots_R.new_empty(count + more, dtype=torch.int32) for more in (0, 0, 1))
    _rows_kernel[(count,)](
        slots_R, last_S, length_S, ids_R, positions_R, rows_R, starts_R, lengths_R, num_warps=1, **CHAIN
    )
    return ids_R, positions_R, rows_R, starts_R, lengths_R


def places(slots_R: Tensor, length_S: Tensor, blocks_SB: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """What `SlotTables.places` promises."""
    count, blocks = len(slots_R), blocks_SB.shape[1]
    table_RB, places_R = blocks_SB.new_empty((count, blocks)), torch.empty_like(slots_R)
    _places_kernel[(count,)](
        slots_R, length_S, blocks_SB, table_RB, places_R, blocks_SB.stride(0),
        COUNT=blocks, PAGE=page_size, BLOCK=triton.next_power_of_2(blocks), num_warps=1, **CHAIN,
    )  # fmt: skip
    return table_RB, places_R


def advance(slots_R: Tensor, tokens_R: Tensor, last_S: Tensor, length_S: Tensor, pad: int) -> None:
    """What `SlotTables.advance` promises."""
    _advance_kernel[(len(slots_R),)](slots_R, tokens_R, last_S, length_S, PAD=pad, num_warps=1, **CHAIN)
