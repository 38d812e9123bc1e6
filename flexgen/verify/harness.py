"""A model without an engine: pools big enough for everything, and steps made by hand. For `verify` and for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flexgen.contract.abi import PageStep, Step
from flexgen.runtime.loading.model import Model
from flexgen.runtime.scheduling.pools import Cache, page_groups


class Harness:
    """Requests of up to `length` tokens in `rows` rows. Row r's pages are fixed; pools start as NaN, which shows any
    read of what was never written. The routers leave the experts of a step's first `routed_tokens` tokens.
    """

    def __init__(
        self, model: Model, rows: int = 4, length: int = 128, page_size: int = 8, routed_tokens: int = 0
    ) -> None:
        self.model, self.page_size = model, page_size
        blocks = -(-length // page_size)
        groups = page_groups(model.mixers, model.state)
        model.make_rope_tables(length)
        self.cache = Cache(model, groups, [rows * blocks] * len(groups), page_size, rows, routed_tokens)
        for index in (index for group in groups for index in group.layers):
            model.layers[index].k_pages.fill_(float("nan"))
            model.layers[index].v_pages.fill_(float("nan"))
        self.entries = [group.entries for group in groups]
        self.table = torch.arange(1, rows * blocks + 1, dtype=torch.int32).view(rows, blocks)
        self.lengths = [0] * rows

    def step(self, tokens: Mapping[int, Sequence[int]]) -> tuple[Tensor, Step]:
        """The next step, which feeds tokens to rows: ids (T,) and the step. Advances the rows."""
        positions: list[int] = []
        rows: list[int] = []
        starts, spans = [0], []
        for number, (row, fed) in enumerate(tokens.items()):
            positions += range(self.lengths[row], self.lengths[row] + len(fed))
            rows += [number] * len(fed)
            self.lengths[row] += len(fed)
            starts.append(starts[-1] + len(fed))
            spans.append((starts[-2], starts[-1], self.lengths[row]))
        device = self.model.device
        positions_T = torch.tensor(positions)
        rows_T = torch.tensor(rows)
        table_RB = self.table[list(tokens)]
        page_T = table_RB[rows_T, positions_T // self.page_size].long()
        slots_T = page_T * self.page_size + positions_T % self.page_size
        pages = [PageStep(slots_T.to(device), table_RB.to(device)) for _ in self.entries]
        step = Step(
            positions_T=positions_T.to(device),
            rows_T=rows_T.int().to(device),
            starts_R=torch.tensor(starts, dtype=torch.int32, device=device),
            lengths_R=torch.tensor([length for _, _, length in spans], dtype=torch.int32, device=device),
            pages={name: group for names, group in zip(self.entries, pages, strict=True) for name in names},
            state_R=torch.tensor([row + 1 for row in tokens], device=device),
        )
        return torch.tensor([token for fed in tokens.values() for token in fed], device=device), step

    def routed(self, tokens: int) -> Tensor:
        """Experts (tokens, routers, K) of the last step's first tokens, each router's in ascending order."""
        if self.cache.recorded is None:
            return torch.empty(tokens, 0, 0)
        return self.cache.recorded[:, :tokens].transpose(0, 1).long().sort().values

    def feed(self, tokens: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """Run the next step -> logits (t, V) of the tokens fed to each row."""
        ids_T, step = self.step(tokens)
        logits_TV = self.model.logits(self.model.forward(ids_T, step))
        return dict(zip(tokens, logits_TV.split([len(fed) for fed in tokens.values()]), strict=True))
