"""Runs planned steps on the device.

Each running request owns a slot, and device tables indexed by slot hold all that a decode step needs: last token, length,
block tables, sampling parameters. A decode step is therefore two functions of the slots alone, `decode_logits` (gather,
forward, head) and `draw` (sample, write last token and length back), which CUDA graphs hold, one each a batch size. A step
with prompts is `packed_logits` of some numbers from the host, and the same `draw`. The host uploads only what changed and
reads tokens one step late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from flexgen.contract.abi import PAD_SLOT, PageStep, Step
from flexgen.runtime.execution import tables as slots
from flexgen.runtime.execution.graphs import Graphs, Steps, packed_shapes
from flexgen.runtime.execution.packed import LAST, PADDING, Packed, Piece, Shape, numbers
from flexgen.runtime.execution.regional import compile_layers, mark_sizes, prepare, unrelated_sizes
from flexgen.runtime.execution.rehearsal import rehearse
from flexgen.runtime.ops.experts import ROUTED_TOKENS
from flexgen.runtime.requests.request import Request
from flexgen.runtime.sampling.sampler import Features, Finish, Sampled, SamplingTables, describe, finish, sample
from flexgen.runtime.scheduling.pages import TableChange
from flexgen.runtime.scheduling.pools import Cache, has_recurrent_state
from flexgen.runtime.scheduling.scheduler import Row, StepPlan
from flexgen.runtime.transfer import Download, upload

CAPTURED = (Features(), Features(random=True))
"""How tokens are drawn by the graphs that are captured at start."""

_TYPICAL_ROWS = 16
"""Rows for which the compiler sizes the blocks of its kernels, which then run any number but 1."""

_SHORT_PROMPT, _LONG_PROMPT = 4, 64
"""Tokens of prompts that are run at start, for their kernels."""

_SCORED_ROWS = 256
"""Prompt positions whose logits are held at once for prompt_logprobs."""


@dataclass
class PromptScores:
    """prompt_logprobs of `request`'s tokens from `position` on."""

    request: Request
    position: int
    values: Download


@dataclass
class Routes:
    """The experts (T, routers, K) of one step's tokens, and the row of the step behind each of its tokens in turn."""

    rows: list[Row]
    values: Download


@dataclass
class InFlight:
    """A launched step: the requests that drew a token, in row order, and their results on the way to the host."""

    requests: list[Request]
    values: Download | None = None
    routes: Routes | None = None
    scores: list[PromptScores] = field(default_factory=list)


class Runner:
    """Owns the slot tables and launches steps.

    `real_vocab` is the number of ids that have a token, `most_tokens` the most that one step takes.
    """

    def __init__(
        self, model: Any, cache: Cache, max_model_len: int, most_tokens: int, real_vocab: int, raw_logprobs: bool
    ) -> None:
        self.model, self.cache, self.device = model, cache, model.device
        self.max_model_len, self.most_tokens = max_model_len, most_tokens
        self.real_vocab, self.raw_logprobs = real_vocab, raw_logprobs
        rows, blocks = cache.slots + 1, -(-max_model_len // cache.block_size)
        self.last_S = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.length_S = torch.ones(rows, dtype=torch.int64, device=self.device)
        self.blocks_SB = [torch.zeros((rows, blocks), dtype=torch.int32, device=self.device) for _ in cache.groups]
        self.sampling = SamplingTables(cache.slots, model.dims.vocab, self.device)
        self._recurrent = has_recurrent_state(model.state)
        self._batch: tuple[int, ...] = ()
        self._batch_slots = upload([], self.device)
        self._finish, self._mark = _last_stage(self.device), lambda step: step
        self._weights_checked = model.weight_version
        self.graphs: Graphs | None = None

    @torch.no_grad()
    def launch(self, plan: StepPlan) -> InFlight:
        """Queue one step; nothing here waits for the device."""
        self._enter(plan.entered)
        self._apply(plan.changes)
        drawing = [row.request for row in plan.rows if row.samples]
        flight = InFlight(drawing)
        if sampled := self._replay(plan, drawing):
            flight.values, flight.routes = _download(sampled), self._routes(plan.rows)
            return flight
        if plan.decode_only:
            slots_R = self._decode_slots(plan.rows)
            logits_RV = self.decode_logits(slots_R)
            flight.routes = self._routes(plan.rows)
        else:
            pieces, last = _pieces(plan.rows)
            hidden_TD = self.forward_pieces(pieces)
            flight.routes = self._routes(plan.rows)
            flight.scores = self._score_prompts(plan.rows, hidden_TD)
            if not drawing:
                return flight
            slots_R = upload([request.slot for request in drawing], self.device)
            logits_RV = self.model.logits(hidden_TD[upload(last, self.device)])
        features = Features.of(drawing, self.model.dims.vocab)
        flight.values = _download(self.draw(logits_RV, slots_R, features, drawing))
        return flight

    def _replay(self, plan: StepPlan, drawing: Sequence[Request]) -> Sampled | None:
        """The step by graphs, or None where it has none: host-side rules, prompt logprobs, or a shape not captured."""
        if self.graphs is None or not drawing or any(request.rules for request in drawing):
            return None
        if self._weights_checked != self.model.weight_version:
            self.graphs.check_addresses()
            self._weights_checked = self.model.weight_version
        features = Features.of(drawing, self.model.dims.vocab)
        slots = [request.slot for request in drawing]
        if plan.decode_only:
            return self.graphs.decode_step(slots, features)
        if any(row.request.params.prompt_logprobs is not None for row in plan.rows):
            return None
        return self.graphs.packed_step(*_pieces(plan.rows), slots, features)

    # ------------------------------------------------------------ compiled and captured

    @torch.no_grad()
    def compile(self, most_rows: int, sizes: Sequence[int]) -> None:
        """Compile the layers for one token and for more.

        Meanwhile the kernels are compiled that decode of `sizes` rows launches, and steps with prompts, if there are sizes.
        """
        prompts = self._prompts() if sizes else ()
        rehearsal = copy(self), sizes, CAPTURED, prompts, torch.is_inference_mode_enabled()
        if self.device.type == "cuda":
            prepare()  # it also says where kernels are cached, before the first is
        with ThreadPoolExecutor(1) as other:
            kernels = other.submit(rehearse, *rehearsal)
            compile_layers(self.model)
            self._mark = mark_sizes
            with unrelated_sizes():
                for rows in (1, max(2, min(_TYPICAL_ROWS, most_rows))):
                    self.decode_logits(torch.full((rows,), PAD_SLOT, device=self.device))
            kernels.result()
        self._reset_pads()

    def _prompts(self) -> list[tuple[int, int]]:
        """(rows, tokens of each) of steps with prompts, short ones and long, few and many: each kind has kernels of its own."""
        room = self.most_tokens - 1  # a padding token comes last
        long = min(_LONG_PROMPT, self.max_model_len, room)
        if not long:
            return []
        many = min(ROUTED_TOKENS // long + 1, room // long)  # beyond ROUTED_TOKENS experts take other kernels
        return [*((shape.rows - 1, _SHORT_PROMPT) for shape in self._shapes()), (1, long), (many, long)]

    @torch.no_grad()
    def capture(self, sizes: Sequence[int], at_start: bool) -> None:
        """Run by CUDA graphs from now on: decode of `sizes`, all captured now, or each when it is first met."""
        steps = Steps(
            decode=self.decode_logits,
            packed=self.packed_logits,
            draw=self.draw,
            clear=self.cache.clear_state,
            keep=self._keep_state,
            recount=lambda: self.sampling.forget(PAD_SLOT),
            reads=self._captured_tensors,
        )
        dtype = self.model.head_dtype or self.model.dtype
        logits_SV = torch.zeros((sizes[-1], self.model.dims.vocab), dtype=dtype, device=self.device)
        self.graphs = Graphs(steps, sizes, self._shapes(), logits_SV, self.max_model_len)
        if at_start:
            self.graphs.capture_all(CAPTURED)

    def _shapes(self) -> list[Shape]:
        """The steps with prompts that graphs hold.

        Rows with recurrent state need slots of their own, and the loop over experts, which serves many tokens of any dtype
        but bf16, waits for the device.
        """
        tokens, rows = self.most_tokens, self.cache.slots
        if any(self.model.routed) and self.model.dtype != torch.bfloat16:
            tokens = min(tokens, ROUTED_TOKENS)
        return packed_shapes(tokens, rows if self._recurrent else max(rows, 4), self.cache.block_size)

    def _keep_state(self, slots: Tensor) -> Callable[[], None]:
        """A function that puts the recurrent state of `slots` back to what it is now."""
        states = [state for layers in self.cache.states.values() for layer in layers for state in layer]
        kept = [state[slots] for state in states]

        def restore() -> None:
            for state, before in zip(states, kept):
                state[slots] = before

        return restore

    def _reset_pads(self) -> None:
        self.cache.clear_state(torch.full((1,), PAD_SLOT, device=self.device))

    def _captured_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What decode reads at fixed addresses: weights, pages, state, rotary tables, and the tables by slot."""
        owners: list[tuple[str, Any]] = [("model", self.model.weights), ("sampling", self.sampling)]
        owners += [(f"layer {index}", layer) for index, layer in enumerate(self.model.layers)]
        for owner, holder in owners:
            yield from ((f"{owner}'s {name}", value) for name, value in vars(holder).items() if isinstance(value, Tensor))
        yield from (("last tokens", self.last_S), ("lengths", self.length_S))
        yield from ((f"block table {group}", blocks_SB) for group, blocks_SB in enumerate(self.blocks_SB))

    # ------------------------------------------------------------ the two parts of a decode step

    def decode_logits(self, slots_R: Tensor) -> Tensor:
        """Logits (R, V) after the last token of each slot; writes that token's K/V or state. A function of the slots."""
        ids_R, positions_R, *of_rows = slots.rows(slots_R, self.last_S, self.length_S)
        pages = {}
        for group, blocks_SB in zip(self.cache.groups, self.blocks_SB):
            table_RB, places_R = slots.places(slots_R, self.length_S, blocks_SB, self.cache.block_size)
            pages.update(dict.fromkeys(group.entries, PageStep(places_R, table_RB)))
        step = Step(positions_R, *of_rows, pages, slots_R if self._recurrent else None)
        return self.model.logits(self.model.forward(ids_R, self._mark(step)))

    def draw(
        self, logits_RV: Tensor, slots_R: Tensor, features: Features, requests: Sequence[Request] = ()
    ) -> Sampled:
        """Sample a token for each slot and make it the slot's last one. Host-side rules of `requests` act if any."""
        lengths_R = self.length_S[slots_R]
        ruled = [(row, request) for row, request in enumerate(requests) if request.rules is not None]
        sampled = sample(
            logits_RV, slots_R, lengths_R, self.sampling, features, self.real_vocab, self.raw_logprobs,
            finish_with=self._finish,
            mask=_edit(ruled, lambda r, row_V: r.rules.mask(row_V, r.outputs)),
            process=_edit(ruled, lambda r, row_V: r.rules.process(row_V, r.prompt, r.outputs)),
        )  # fmt: skip
        slots.advance(slots_R, sampled.tokens_R, self.last_S, self.length_S)
        return sampled

    def packed_logits(self, packed: Packed) -> Tensor:
        """Logits (R, V) after the last tokens of a step with prompts."""
        return self.model.logits(self.packed_hidden(packed)[packed.last_R])

    def packed_hidden(self, packed: Packed) -> Tensor:
        """Hidden states (T, D) of a step with prompts; writes its K/V and state."""
        slots_R, rows_T = packed.slots_R.clone(), packed.rows_T.int()
        ids_T = torch.where(packed.ids_T == LAST, self.last_S[slots_R][rows_T], packed.ids_T)
        starts_R, lengths_R = packed.starts_R.int(), packed.lengths_R.int()
        size, pages = self.cache.block_size, {}
        for group, blocks_SB in zip(self.cache.groups, self.blocks_SB):
            table_RB = blocks_SB[slots_R]
            page_T = table_RB[rows_T, packed.positions_T // size]
            places_T = page_T.long() * size + packed.positions_T % size
            pages.update(dict.fromkeys(group.entries, PageStep(places_T, table_RB)))
        state_R = slots_R if self._recurrent else None
        step = Step(packed.positions_T.clone(), rows_T, starts_R, lengths_R, pages, state_R)
        return self.model.forward(ids_T, self._mark(step))

    def forward_pieces(self, pieces: Sequence[Piece]) -> Tensor:
        """Hidden states of the pieces' tokens. A padding piece comes last: sizes of 1 are special to the compiler."""
        pieces = [*pieces, PADDING]
        return self.packed_hidden(Packed.of(upload(numbers(pieces, ()), self.device), Shape.of(pieces)))

    def _routes(self, rows: Sequence[Row]) -> Routes | None:
        """The experts that the step's tokens were sent to, if a request asked for its own."""
        if all(row.request.routes is None for row in rows):
            return None
        tokens = sum(row.count for row in rows)
        return Routes(list(rows), Download((self.cache.routed[:, :tokens].transpose(0, 1).contiguous(),)))

    def _score_prompts(self, rows: Sequence[Row], hidden_TD: Tensor) -> list[PromptScores]:
        """Logprobs of the prompt tokens that follow this step's positions, for requests that asked for them."""
        scores, offset = [], 0
        for row in rows:
            request, first = row.request, offset
            offset += row.count
            if request.params.prompt_logprobs is None:
                continue
            count = min(row.start + row.count, len(request.prompt) - 1) - row.start
            for start in range(0, count, _SCORED_ROWS):
                stop = min(start + _SCORED_ROWS, count)
                position = row.start + start + 1
                following = upload(request.prompt[position : position + stop - start], self.device)
                scored = self._score(hidden_TD[first + start : first + stop], following, request.params.prompt_logprobs)
                scores.append(PromptScores(request, position, _download(scored)))
        return scores

    def _score(self, hidden_RD: Tensor, following_R: Tensor, top: int) -> Sampled:
        logits_RV = self.model.logits(hidden_RD).float()
        logits_RV[:, self.real_vocab :] = float("-inf")
        return describe(logits_RV.log_softmax(-1), following_R, self.model.dims.vocab if top == -1 else top)

    def _decode_slots(self, rows: Sequence[Row]) -> Tensor:
        """The slots of a decode batch that no graph serves; uploaded only when the batch is another one."""
        batch = tuple(row.request.slot for row in rows)
        if batch != self._batch:
            self._batch, self._batch_slots = batch, upload(batch, self.device)
        return self._batch_slots

    def _enter(self, requests: Sequence[Request]) -> None:
        if not requests:
            return
        columns = zip(*((request.slot, len(request.tokens), request.tokens[-1]) for request in requests))
        slots, lengths, last = upload(list(columns), self.device)
        self.length_S[slots], self.last_S[slots] = lengths, last
        for blocks_SB in self.blocks_SB:
            blocks_SB.index_fill_(0, slots, 0)
        self.cache.clear_state(slots)
        self.sampling.enter(requests)

    def _apply(self, changes: Sequence[TableChange]) -> None:
        for group, blocks_SB in enumerate(self.blocks_SB):
            columns = list(zip(*(change for change in changes if change.group == group)))
            if columns:
                _, slots, blocks, pages = upload(columns, self.device)
                blocks_SB[slots, blocks] = pages.int()


def _pieces(rows: Sequence[Row]) -> tuple[list[Piece], list[int]]:
    """The tokens of a step's rows, and which of them are the last ones of the rows that draw."""
    pieces = []
    for row in rows:
        ids = (LAST,) if row.decodes else row.request.tokens[row.start : row.start + row.count]
        pieces.append(Piece(row.request.slot, row.start, ids))
    ends = accumulate(row.count for row in rows)
    return pieces, [end - 1 for row, end in zip(rows, ends) if row.samples]


def _last_stage(device: torch.device) -> Finish:
    """`sampler.finish` for tensors on `device`."""
    if device.type != "cuda":
        return finish
    from flexgen.runtime.sampling import kernel as sampling  # Triton is there where CUDA is

    return sampling.finish


def _edit(ruled: Sequence[tuple[int, Request]], change: Any) -> Any:
    """A function that lets `change(request, logits_V)` act on the rows of `ruled`, or None where there are none."""
    if not ruled:
        return None

    def edit(logits_RV: Tensor) -> Tensor:
        logits_RV = logits_RV.clone()
        for row, request in ruled:
            logits_RV[row] = change(request, logits_RV[row])
        return logits_RV

    return edit


def _download(sampled: Sampled) -> Download:
    return Download(
        (sampled.tokens_R, sampled.logprobs_R, sampled.ranks_R, sampled.top_ids_RK, sampled.top_logprobs_RK)
    )
