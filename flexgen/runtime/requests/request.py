"""One answer in the making (`Request`) and the prompt that it belongs to (`RequestGroup`).

Admission makes them; scheduler, tables, sampler and engine each write the fields that are theirs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from flexgen.runtime.requests.outputs import CompletionOutput, RequestOutput, RequestStateStats, TokenLogprobs
from flexgen.runtime.requests.params import RequestOutputKind, SamplingParams
from flexgen.runtime.requests.stops import Detokenizer, StopRules

if TYPE_CHECKING:
    from flexgen.runtime.requests.rules import HostRules


@dataclass(eq=False)
class Request:
    """State of one answer. All of it survives preemption except `slot`, `pages`, `trimmed`, `computed` and `registered`.

    stop_ids    every id that ends a text, which min_tokens keeps from being drawn
    banned_tokens  bad words of one token
    tokens      prompt and confirmed output ids
    length      tokens known to the device: confirmed ones and those that the host has not read yet
    most_tokens  length at which it ends whatever it generates
    computed    positions whose K/V (or state) is written by the steps launched so far
    pages       per page group, the page of each block; 0 where the block was freed behind a window
    trimmed     per page group, blocks before this index are freed
    routes      the experts of each position, where asked for, and `routes_known`, of how many positions they are known;
                `shared_routes` are rows of other requests that belong in it, from a position on: cached blocks
    priority    lower ones run first; among equals, those that came first
    scheduled_at, first_token_at, last_token_at  seconds of time.monotonic; 0: not yet
    hashes      chain hash of each full block of `tokens`, and `registered`, how many of them the prefix cache knows
    """

    index: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    stops: StopRules
    stop_ids: tuple[int, ...] = ()
    banned_tokens: tuple[int, ...] = ()
    rules: HostRules | None = None
    detokenizer: Detokenizer | None = None
    deadline: float | None = None
    priority: int = 0

    tokens: list[int] = field(default_factory=list)
    length: int = field(init=False)
    most_tokens: int = field(init=False)
    computed: int = 0
    slot: int = 0
    pages: list[list[int]] = field(default_factory=list)
    trimmed: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    registered: int = 0
    cache_root: bytes = b""
    cached_tokens: int = 0

    text: str = ""
    decoded: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cumulative_logprob: float = 0.0
    routes: np.ndarray | None = None
    routes_known: int = 0
    shared_routes: list[tuple[int, np.ndarray]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    scheduled_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0

    def __post_init__(self) -> None:
        self.tokens, self.length = list(self.prompt), len(self.prompt)
        self.most_tokens = self.length + self.stops.max_tokens
        if self.params.logprobs is not None:
            self.logprobs = []
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]

    @property
    def order(self) -> tuple[int, int]:
        """Its place among requests: those with a lower one go first."""
        return self.priority, self.index

    @property
    def unread(self) -> int:
        """Tokens drawn on the device that the host has not read yet."""
        return self.length - len(self.tokens)

    @property
    def blocks(self) -> int:
        """Blocks that have a page, or had one, in each page group."""
        return len(self.pages[0]) if self.pages else 0

    @property
    def outputs(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def produced(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def reads_no_cache(self) -> bool:
        """Whether cached prefixes are of no use: prompt_logprobs need every position, or the caller said so."""
        return self.params.prompt_logprobs is not None or bool(self.params.skip_reading_prefix_cache)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def decoding(self) -> bool:
        """Whether only its last token is left to compute, which the device tables alone describe."""
        return self.computed == self.length - 1

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason

    def take(self, token: int, logprob: float, listed: TokenLogprobs | None) -> None:
        """Append one confirmed token, and end where it says so. `listed`: what is returned of its position."""
        self.tokens.append(token)
        self.last_token_at = time.monotonic()
        self.first_token_at = self.first_token_at or self.last_token_at
        if self.logprobs is not None:
            assert listed is not None
            self.logprobs.append(listed)
            self.cumulative_logprob += logprob
        ending = self.stops.by_token(token, self.produced)
        if ending is None and self.rules is not None and self.rules.complete:
            ending = ("stop", None)
        if ending is not None:
            self.finish(*ending)
        if self.stops.strings:
            self.check_stop_strings()

    def take_routes(self, start: int, routes: np.ndarray) -> None:
        """Keep the experts (tokens, routers, K) of positions from `start` on; what a preemption repeats is known."""
        stop = start + len(routes)
        if self.routes is not None and stop > self.routes_known:
            self.routes[self.routes_known : stop] = routes[self.routes_known - start :]
            self.routes_known = stop

    def catch_up_text(self) -> None:
        """Decode the tokens that `text` lacks; a finished answer holds back nothing."""
        if self.detokenizer is None:
            return
        ids = self.tokens[len(self.prompt) + self.decoded :]
        self.decoded += len(ids)
        if self.finish_reason == "stop" and not isinstance(self.stop_reason, str) and ids:
            ids = ids if self.params.include_stop_str_in_output else ids[:-1]  # the token that ended it is not text
        self.text += self.detokenizer.push(ids)
        if self.finished:
            self.text += self.detokenizer.flush()

    def share_routes(self, start: int, routes: np.ndarray) -> None:
        """Take the experts of a cached block from `start` on, except for positions that are known. Its rows may still be
        on their way to the host, so they are copied when they are wanted."""
        known = max(0, self.routes_known - start)
        if known < len(routes):
            self.shared_routes.append((start + known, routes[known:]))
            self.routes_known = start + len(routes)

    def known_routes(self, start: int, stop: int) -> np.ndarray | None:
        """The experts of positions from `start` to before `stop`: a view, whose last step's rows are still to come."""
        if self.routes is None:
            return None
        for position, routes in self.shared_routes:
            self.routes[position : position + len(routes)] = routes
        self.shared_routes.clear()
        return self.routes[start:stop]

    def returned_routes(self) -> np.ndarray | None:
        """A copy for the caller, without positions after the last token but one: the last one is never computed."""
        routes = self.known_routes(0, min(self.routes_known, len(self.tokens) - 1))
        return None if routes is None else routes.copy()

    def check_stop_strings(self) -> None:
        """Bring the text up to date and end where a stop string is complete; it decides over any other ending."""
        before = len(self.text)
        self.catch_up_text()
        found = self.stops.by_text(self.text, len(self.text) - before) if self.produced > self.stops.min_tokens else None
        if found is not None:
            string, end = found
            self.text, self.detokenizer = self.text[:end], None
            self.finish("stop", string)


@dataclass(eq=False)
class RequestGroup:
    """A prompt and its n answers. `version` rises whenever one of them grows or ends."""

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    requests: list[Request]
    version: int = 0
    arrival_time: float = field(default_factory=time.time)
    queued_at: float = field(default_factory=time.monotonic)
    _sent: list[tuple[int, int]] = field(default_factory=list, repr=False)

    @property
    def finished(self) -> bool:
        return all(request.finished for request in self.requests)

    @property
    def error(self) -> str | None:
        return next((request.error for request in self.requests if request.error), None)

    def output(self) -> RequestOutput:
        """Everything so far; with `RequestOutputKind.DELTA`, what is new since the last call."""
        delta = self.params.output_kind is RequestOutputKind.DELTA
        first = self.requests[0]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids,
            outputs=[self._completion(index, request, delta) for index, request in enumerate(self.requests)],
            finished=self.finished,
            prompt_logprobs=first.prompt_logprobs,
            num_cached_tokens=first.cached_tokens,
            metrics=self._metrics(),
        )

    def _metrics(self) -> RequestStateStats:
        began, first_token = (
            min(filter(None, (getattr(request, name) for request in self.requests)), default=0.0)
            for name in ("scheduled_at", "first_token_at")
        )
        return RequestStateStats(
            num_generation_tokens=sum(request.produced for request in self.requests),
            arrival_time=self.arrival_time,
            queued_ts=self.queued_at,
            scheduled_ts=began,
            first_token_ts=first_token,
            last_token_ts=max(request.last_token_at for request in self.requests),
            first_token_latency=first_token - self.queued_at if first_token else 0.0,
        )

    def _completion(self, index: int, request: Request, delta: bool) -> CompletionOutput:
        request.catch_up_text()
        shown = len(request.text) if request.finished else max(0, len(request.text) - request.stops.held_back)
        text_from, tokens_from = self._since(index, shown, request.produced) if delta else (0, 0)
        return CompletionOutput(
            index=index,
            text=request.text[text_from:shown],
            token_ids=request.tokens[len(request.prompt) + tokens_from :],
            cumulative_logprob=None if request.logprobs is None else request.cumulative_logprob,
            logprobs=None if request.logprobs is None else request.logprobs[tokens_from:],
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            routed_experts=request.returned_routes() if request.finished else None,
            error=request.error,
        )

    def _since(self, index: int, text: int, tokens: int) -> tuple[int, int]:
        if not self._sent:
            self._sent = [(0, 0)] * len(self.requests)
        before, self._sent[index] = self._sent[index], (text, tokens)
        return before
