"""Which requests run in the next step, and how many tokens of each: first come, first served, but for priorities. The engine
asks before each step.

Running requests go first, in order: one token for those that decode, a chunk of the rest for those in prefill. Then
waiting ones enter while slots, pages and the token budget last. When pages run out, the last running request goes
back to the waiting ones; it keeps its tokens and is computed again later. The first can always run, so all end.
"""

from __future__ import annotations

import hashlib
import time
from bisect import insort
from dataclasses import dataclass, field
from operator import attrgetter

from flexgen.runtime.requests.request import Request
from flexgen.runtime.scheduling.adapters import AdapterSlots
from flexgen.runtime.scheduling.metrics import Metrics
from flexgen.runtime.scheduling.pages import BlockTables, TableChange


@dataclass(slots=True)
class Row:
    """`count` tokens of one request from position `start`. `samples`: they reach its end, so a token is drawn."""

    request: Request
    start: int
    count: int
    samples: bool
    decodes: bool


@dataclass
class StepPlan:
    """One step: its rows, the requests that got a slot in it, and what changed in the block tables.

    adapters  slots to be written first, each with its adapter
    """

    rows: list[Row] = field(default_factory=list)
    entered: list[Request] = field(default_factory=list)
    changes: list[TableChange] = field(default_factory=list)
    adapters: list[tuple[int, int]] = field(default_factory=list)

    @property
    def decode_only(self) -> bool:
        return all(row.decodes for row in self.rows)

    @property
    def prompt_tokens(self) -> int:
        """How many of its tokens are prompt tokens."""
        in_prompt = [row for row in self.rows if row.start < len(row.request.prompt)]
        return sum(min(row.count, len(row.request.prompt) - row.start) for row in in_prompt)


class Scheduler:
    """Waiting and running requests. Both lists are kept in their order: by priority, then by arrival."""

    def __init__(self, tables: BlockTables, max_num_seqs: int, max_num_batched_tokens: int, metrics: Metrics, max_loras: int = 0) -> None:
        self.tables, self.metrics = tables, metrics
        self.adapters = AdapterSlots(max_loras)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.free_slots = list(range(max_num_seqs, 0, -1))

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=attrgetter("order"))

    def remove(self, request: Request) -> None:
        """Forget a request, whatever it is doing, and free all that it holds."""
        if request in self.running:
            self.running.remove(request)
            self._evict(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def lock_step(self) -> bool:
        """Whether a running request needs its tokens read before its next step."""
        return any(request.rules is not None for request in self.running)

    def schedule(self, cache_root: bytes) -> StepPlan:
        """The next step, maybe empty. `cache_root` names the weights that prefixes computed now belong to."""
        for request in self.running:
            if request.cache_root == _root(request, cache_root):
                self.tables.register(request)
        plan = StepPlan()
        budget, preempted = self._continue_running(plan)
        if self.waiting and self.free_slots and not preempted:
            self._admit(plan, budget, cache_root)
        plan.changes = self.tables.take_changes()
        return plan

    def _continue_running(self, plan: StepPlan) -> tuple[int, bool]:
        """Plan the running requests; returns what is left of the token budget and whether any was preempted."""
        preempted = False
        budget = self.max_num_batched_tokens - sum(request.decoding for request in self.running)
        for request in list(self.running):
            if not request.slot:
                continue  # preempted for an older one
            if request.length == request.most_tokens:
                budget += 1  # its last token is on its way: it computes none
                continue
            left = request.length - request.computed
            count = 1 if left == 1 else min(left, budget)
            if count <= 0:
                continue
            while request.slot and not self.tables.grow(request, request.computed + count):
                victim, preempted = self.running[-1], True
                budget += victim.decoding
                self._preempt(victim)
            if request.slot:
                self._plan(plan, request, count)
                budget -= count if left > 1 else 0
        return budget, preempted

    def _admit(self, plan: StepPlan, budget: int, cache_root: bytes) -> None:
        promised = self._promised_blocks()
        for request in list(self.waiting):
            if not self.free_slots or budget <= 0:
                return
            if not self.adapters.can_take(request.adapter):
                continue  # every slot is in use: it waits, and others go first
            self.tables.begin(request, _root(request, cache_root))
            cached = 0
            if not request.reads_no_cache:
                cached = self.tables.cached_blocks(request)
                if self._is_promised(request, cached, promised):
                    continue  # an equal prefix is being computed: use it when it is there
            count = min(len(request.tokens) - cached * self.tables.block_size, budget)
            if not self.tables.can_admit(request, cached, cached * self.tables.block_size + count):
                return
            self._enter(plan, request, cached, count)
            budget -= count
            promised.update(request.hashes[cached:])

    def _enter(self, plan: StepPlan, request: Request, cached: int, count: int) -> None:
        self.waiting.remove(request)
        insort(self.running, request, key=attrgetter("order"))
        request.slot = self.free_slots.pop()
        request.adapter_slot, fresh = self.adapters.take(request.adapter)
        if fresh:
            plan.adapters.append((request.adapter_slot, request.adapter))
        request.scheduled_at = request.scheduled_at or time.monotonic()
        if cached:
            self.tables.adopt(request, cached)
        if not self.tables.grow(request, request.computed + count):
            raise AssertionError("an admitted request did not get the pages that were counted for it")
        if not request.produced:
            request.cached_tokens = request.computed
        self.metrics.prefix_cache_hit_tokens += request.computed
        plan.entered.append(request)
        self._plan(plan, request, count)

    def _promised_blocks(self) -> set[bytes]:
        """Blocks that running requests are computing or will compute, and that a later step can share."""
        return {key for request in self.running for key in request.hashes[request.computed // self.tables.block_size :]}

    def _is_promised(self, request: Request, cached: int, promised: set[bytes]) -> bool:
        shareable = (len(request.tokens) - 1) // self.tables.block_size
        return cached < min(shareable, len(request.hashes)) and request.hashes[cached] in promised

    def _plan(self, plan: StepPlan, request: Request, count: int) -> None:
        left = request.length - request.computed
        plan.rows.append(Row(request, request.computed, count, samples=count == left, decodes=left == 1))
        request.computed += count
        request.length += count == left

    def preempt_all(self) -> None:
        """Let every running request wait, with the tokens that it has. No step may be in flight."""
        for request in list(self.running):
            self._preempt(request)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._evict(request)
        insort(self.waiting, request, key=attrgetter("order"))
        self.metrics.preemptions += 1

    def _evict(self, request: Request) -> None:
        self.tables.release(request)
        self.free_slots.append(request.slot)
        self.adapters.give_back(request.adapter)
        request.slot = 0


def _root(request: Request, cache_root: bytes) -> bytes:
    """What prefixes of a request belong to: the weights, and its adapter."""
    return hashlib.blake2b(cache_root + request.adapter_key, digest_size=16).digest() if request.adapter else cache_root
