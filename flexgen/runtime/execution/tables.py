"""The tables by slot: what of a running request the device knows. Steps read them at their beginning and write them at their end.

The runner enters requests here and applies changes of block tables; `step` reads rows and places and advances.

Shape suffixes: S slots, R rows, B blocks of a block table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flexgen.contract.abi import PAD_SLOT
from flexgen.runtime.requests.request import Request
from flexgen.runtime.scheduling.pages import TableChange
from flexgen.runtime.transfer import upload


class SlotTables:
    """Of each slot its last token, its length and its block tables; they stay where they are for the engine's life.

    last_S     (S,) int64      the last token
    length_S   (S,) int64      how many tokens, the last one included
    blocks_SB  (S, B) int32, one a page group: the page of each block
    adapter_S  (S,) int64      where its adapter lies, 0: none; None where requests bring none
    The pad slot keeps one token, 0.
    """

    def __init__(self, slots: int, groups: int, blocks: int, device: torch.device, adapters: bool = False) -> None:
        rows = slots + 1
        self.device = device
        self.last_S = torch.zeros(rows, dtype=torch.int64, device=device)
        self.length_S = torch.ones(rows, dtype=torch.int64, device=device)
        self.blocks_SB = [torch.zeros((rows, blocks), dtype=torch.int32, device=device) for _ in range(groups)]
        self.adapter_S = torch.zeros(rows, dtype=torch.int64, device=device) if adapters else None

    def enter(self, requests: Sequence[Request]) -> Tensor:
        """Write requests that just got their slots, with empty block tables; returns the slots."""
        columns = zip(*((request.slot, len(request.tokens), request.tokens[-1]) for request in requests))
        slots, lengths, last = upload(list(columns), self.device)
        self.length_S[slots], self.last_S[slots] = lengths, last
        for blocks_SB in self.blocks_SB:
            blocks_SB.index_fill_(0, slots, 0)
        if self.adapter_S is not None:
            self.adapter_S[slots] = upload([request.adapter_slot for request in requests], self.device)
        return slots

    def apply(self, changes: Sequence[TableChange]) -> None:
        """Write what changed in the block tables."""
        for group, blocks_SB in enumerate(self.blocks_SB):
            columns = list(zip(*(change for change in changes if change.group == group)))
            if columns:
                _, slots, blocks, pages = upload(columns, self.device)
                blocks_SB[slots, blocks] = pages.int()

    def rows(self, slots_R: Tensor) -> tuple[Tensor, ...]:
        """A decode step's ids (R,) int64, positions (R,) int64, and `Step`'s rows_T, starts_R and lengths_R."""
        if slots_R.is_cuda:
            from flexgen.runtime.execution import tables_kernel  # Triton is there where CUDA is

            return tables_kernel.rows(slots_R, self.last_S, self.length_S)
        lengths_R = self.length_S[slots_R]
        rows_R, starts_R = (
            torch.arange(len(slots_R) + more, dtype=torch.int32, device=slots_R.device) for more in (0, 1)
        )
        return self.last_S[slots_R], lengths_R - 1, rows_R, starts_R, lengths_R.int()

    def places(self, slots_R: Tensor, group: int, page_size: int) -> tuple[Tensor, Tensor]:
        """Each slot's block table (R, B), and where its last token lies among all pages' tokens, (R,) int64."""
        blocks_SB = self.blocks_SB[group]
        if slots_R.is_cuda:
            from flexgen.runtime.execution import tables_kernel

            return tables_kernel.places(slots_R, self.length_S, blocks_SB, page_size)
        table_RB, positions_R = blocks_SB[slots_R], self.length_S[slots_R] - 1
        page_R = table_RB.gather(1, (positions_R // page_size)[:, None])[:, 0]
        return table_RB, page_R.long() * page_size + positions_R % page_size

    def advance(self, slots_R: Tensor, tokens_R: Tensor) -> None:
        """Append each slot's token."""
        if slots_R.is_cuda:
            from flexgen.runtime.execution import tables_kernel

            tables_kernel.advance(slots_R, tokens_R, self.last_S, self.length_S, PAD_SLOT)
            return
        live_R = slots_R != PAD_SLOT
        self.last_S[slots_R] = torch.where(live_R, tokens_R, 0)
        self.length_S[slots_R] = torch.where(live_R, self.length_S[slots_R] + 1, 1)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All of them by name, as an error names them."""
        yield from (("last tokens", self.last_S), ("lengths", self.length_S))
        if self.adapter_S is not None:
            yield "adapters", self.adapter_S
        yield from ((f"block table {group}", blocks_SB) for group, blocks_SB in enumerate(self.blocks_SB))
