"""What a step does on the device, as functions of the tables by slot. `runner` calls them, and `graphs` hold them captured.

Each running request owns a slot, and tables indexed by slot hold all that a decode step needs: last token, length, block
tables, sampling parameters. So a decode step is two functions of the slots alone: `decode_logits` (gather, forward, head)
and `draw` (sample, write last token and length back). A step with prompts is `packed_logits`, a function of some numbers
from the host, and the same `draw`.

Shape suffixes: T tokens, R rows, B blocks of a block table, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flexgen.contract.abi import PageStep, Step
from flexgen.runtime.execution.packed import LAST, PADDING, Packed, Piece, Shape, numbers
from flexgen.runtime.execution.tables import SlotTables
from flexgen.runtime.loading.attached import Attached
from flexgen.runtime.ops.attention import plan_split
from flexgen.runtime.ops.lora import Adapted
from flexgen.runtime.requests.request import Request
from flexgen.runtime.requests.rules import HostRules
from flexgen.runtime.sampling.sampler import Features, LogitsEdit, Sampled, SamplingTables, sample
from flexgen.runtime.scheduling.pools import Cache, PageGroup, has_recurrent_state
from flexgen.runtime.served import ServedModel
from flexgen.runtime.transfer import upload


@dataclass(eq=False)
class DeviceStep:
    """One model over one set of tables.

    real_vocab    ids that have a token; the rest of the vocabulary pads it
    raw_logprobs  logprobs are those of the model's own logits
    adapters      tables of the adapters that requests bring, or None
    mark          told of every `Step` before the model runs it; compilation marks the sizes that change
    """

    model: ServedModel
    cache: Cache
    tables: SlotTables
    sampling: SamplingTables
    real_vocab: int
    raw_logprobs: bool
    adapters: Attached | None = None
    mark: Callable[[Step], Step] = lambda step: step
    recurrent: bool = field(init=False)

    def __post_init__(self) -> None:
        self.recurrent = has_recurrent_state(self.model.state)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def enter(self, requests: Sequence[Request]) -> None:
        """Write all that is known of requests that just got their slots."""
        if requests:
            self.cache.clear_state(self.tables.enter(requests))
            self.sampling.enter(requests)

    def decode_logits(self, slots_R: Tensor) -> Tensor:
        """Logits (R, V) after the last token of each slot; writes that token's K/V or state. A function of the slots."""
        ids_R, positions_R, rows_R, starts_R, lengths_R = self.tables.rows(slots_R)
        if self.adapters is not None:
            self._adapt(self.adapters.slots_T, slots_R)
        pages: dict[str, PageStep] = {}
        for index, group in enumerate(self.cache.groups):
            table_RB, places_R = self.tables.places(slots_R, index, self.cache.block_size)
            pages |= self._pages(group, places_R, table_RB, lengths_R)
        step = Step(positions_R, rows_R, starts_R, lengths_R, pages, slots_R if self.recurrent else None)
        return self.logits(self.model.forward(ids_R, self.mark(step)), slots_R)

    def packed_logits(self, packed: Packed) -> Tensor:
        """Logits (R, V) after the last tokens of a step with prompts."""
        return self.logits(self.packed_hidden(packed)[packed.last_R], packed.slots_R)

    def packed_hidden(self, packed: Packed) -> Tensor:
        """Hidden states (T, D) of a step with prompts; writes its K/V and state."""
        slots_R, rows_T = packed.slots_R.clone(), packed.rows_T.int()
        ids_T = torch.where(packed.ids_T == LAST, self.tables.last_S[slots_R][rows_T], packed.ids_T)
        if self.adapters is not None:
            self._adapt(self.adapters.slots_T, slots_R[rows_T])
        starts_R, lengths_R = packed.starts_R.int(), packed.lengths_R.int()
        size = self.cache.block_size
        pages: dict[str, PageStep] = {}
        for group, blocks_SB in zip(self.cache.groups, self.tables.blocks_SB):
            table_RB = blocks_SB[slots_R]
            page_T = table_RB[rows_T, packed.positions_T // size]
            places_T = page_T.long() * size + packed.positions_T % size
            pages |= self._pages(group, places_T, table_RB, lengths_R)
        state_R = slots_R if self.recurrent else None
        step = Step(packed.positions_T.clone(), rows_T, starts_R, lengths_R, pages, state_R)
        return self.model.forward(ids_T, self.mark(step))

    def logits(self, hidden_RD: Tensor, slots_R: Tensor) -> Tensor:
        """Hidden states of rows (R, D), and whose they are, to logits (R, V)."""
        if self.adapters is not None:
            self._adapt(self.adapters.slots_R, slots_R)
        return self.model.logits(hidden_RD)

    def _adapt(self, adapters_T: Tensor, slots_T: Tensor) -> None:
        """Tell the weights where the adapter of each token, or row of logits, lies."""
        assert self.tables.adapter_S is not None
        adapters_T[: len(slots_T)].copy_(self.tables.adapter_S[slots_T])

    def _pages(self, group: PageGroup, places_T: Tensor, table_RB: Tensor, lengths_R: Tensor) -> dict[str, PageStep]:
        """A page group's part of a step, for each attention that uses it."""
        split = plan_split(lengths_R, table_RB, self.cache.block_size, group.geometry, self.cache.dtype)
        return dict.fromkeys(group.entries, PageStep(places_T, table_RB, split))

    def pieces_hidden(self, pieces: Sequence[Piece]) -> Tensor:
        """Hidden states of the pieces' tokens. A padding piece comes last: sizes of 1 are special to the compiler."""
        pieces = [*pieces, PADDING]
        return self.packed_hidden(Packed.of(upload(numbers(pieces, ()), self.device), Shape.of(pieces)))

    def draw(
        self, logits_RV: Tensor, slots_R: Tensor, features: Features, requests: Sequence[Request] = ()
    ) -> Sampled:
        """Sample a token for each slot and make it the slot's last one. Host-side rules of `requests` act if any."""
        lengths_R = self.tables.length_S[slots_R]
        ruled = [(row, request, request.rules) for row, request in enumerate(requests) if request.rules is not None]
        sampled = sample(
            logits_RV, slots_R, lengths_R, self.sampling, features, self.real_vocab, self.raw_logprobs,
            mask=_edit(ruled, lambda r, rules, row_V: rules.mask(row_V, r.outputs)),
            process=_edit(ruled, lambda r, rules, row_V: rules.process(row_V, r.prompt, r.outputs)),
        )  # fmt: skip
        self.tables.advance(slots_R, sampled.tokens_R)
        return sampled

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What steps read at fixed addresses: weights, pages, state, rotary tables, and the tables by slot."""
        owners: list[tuple[str, Any]] = [("model", self.model.weights), ("sampling", self.sampling)]
        owners += [(f"layer {index}", layer) for index, layer in enumerate(self.model.layers)]
        for owner, holder in owners:
            for name, value in vars(holder).items():
                held = {"": value.weight, " A": value.a, " B": value.b} if isinstance(value, Adapted) else {"": value}
                yield from ((f"{owner}'s {name}{part}", each) for part, each in held.items() if isinstance(each, Tensor))
        yield from self.tables.tensors()


def _edit(
    ruled: Sequence[tuple[int, Request, HostRules]], change: Callable[[Request, HostRules, Tensor], Tensor]
) -> LogitsEdit | None:
    """A function that lets `change(request, rules, logits_V)` act on the rows of `ruled`, or None where there are none."""
    if not ruled:
        return None

    def edit(logits_RV: Tensor) -> Tensor:
        logits_RV = logits_RV.clone()
        for row, request, rules in ruled:
            logits_RV[row] = change(request, rules, logits_RV[row])
        return logits_RV

    return edit
