"""The engine: requests in, steps, tokens out. `LLM` and `AsyncEngine` are two ways to drive it."""

from __future__ import annotations

import hashlib
import logging
import operator
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import repeat
from numbers import Real
from typing import Any

import numpy as np
import torch

from flexgen.runtime.execution.step import InFlight, PromptScores, Routes, Runner
from flexgen.runtime.options import EngineOptions
from flexgen.runtime.requests.outputs import Logprob, TokenLogprobs
from flexgen.runtime.requests.params import SamplingParams
from flexgen.runtime.requests.request import Request, RequestGroup
from flexgen.runtime.requests.rules import HostRules, bad_word_ids
from flexgen.runtime.requests.stops import Detokenizer, StopRules
from flexgen.runtime.requests.structured import GrammarCompiler
from flexgen.runtime.requests.tokens import Tokens
from flexgen.runtime.scheduling.metrics import Metrics
from flexgen.runtime.scheduling.pages import PageTables
from flexgen.runtime.scheduling.pools import Cache, has_recurrent_state, page_groups
from flexgen.runtime.scheduling.scheduler import Scheduler, StepPlan
from flexgen.runtime.scheduling.sizing import size_pools

log = logging.getLogger(__name__)


def _in_turn(method: Callable[..., Any]) -> Callable[..., Any]:
    """Only one thread at a time is inside an engine."""

    @wraps(method)
    def run(engine: Engine, *args: Any, **kwargs: Any) -> Any:
        with engine._turn:
            return method(engine, *args, **kwargs)

    return run


class Engine:
    """One model, its pages and slots, and all requests on them. Calls from several threads take turns.

    Raises ValueError for a request that it cannot serve, with the numbers, and then holds nothing of it.
    """

    def __init__(self, model: Any, tokens: Tokens, options: EngineOptions) -> None:
        self.model, self.tokens, self.options = model, tokens, options
        self._turn = threading.RLock()
        self.metrics = Metrics()
        wanted = options.enable_prefix_caching is not False
        self.prefix_caching = wanted and not has_recurrent_state(model.state)
        if wanted and not self.prefix_caching:
            level = logging.WARNING if options.enable_prefix_caching else logging.INFO
            log.log(level, "prefix caching is off: this model has recurrent state, which is not kept at block ends")
        groups = page_groups(model.mixers, model.state)
        pages = size_pools(model, groups, options)
        routed_tokens = options.max_num_batched_tokens + 1 if options.enable_return_routed_experts else 0
        if routed_tokens and not any(model.routed):
            raise ValueError("enable_return_routed_experts=True, and this model has no routed experts; leave it out")
        self.cache = Cache(model, groups, pages, options.block_size, options.max_num_seqs, routed_tokens)
        windows = [group.geometry.window for group in groups]
        self.tables = PageTables(pages, windows, options.block_size, self.prefix_caching)
        self.scheduler = Scheduler(self.tables, options.max_num_seqs, options.max_num_batched_tokens, self.metrics)
        raw = options.logprobs_mode == "raw_logprobs"
        model.make_rope_tables(options.max_model_len)
        chunk = options.max_num_batched_tokens
        self.runner = Runner(model, self.cache, options.max_model_len, chunk, tokens.vocab, raw)
        self.startup = {"load": model.load_seconds, "compile": 0.0, "capture": 0.0}
        if model.device.type == "cuda" and not options.enforce_eager:
            self._prepare_decode()
        self._groups: dict[Request, RequestGroup] = {}
        self._seeds = random.Random(options.seed)
        self._arrivals = 0
        self._flight: InFlight | None = None
        self._grammars: GrammarCompiler | None = None

    def _prepare_decode(self) -> None:
        """Compile and capture, and print how long each took."""
        for phase, run in (("compile", self._compile), ("capture", self._capture)):
            started = time.perf_counter()
            run()
            torch.cuda.synchronize(self.model.device)
            self.startup[phase] = time.perf_counter() - started
        phases = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in self.startup.items())
        print(f"flexgen start-up: {phases}", file=sys.stderr, flush=True)

    def _compile(self) -> None:
        options = self.options
        self.runner.compile(options.max_num_seqs, () if options.lazy_capture else options.capture_sizes)

    def _capture(self) -> None:
        self.runner.capture(self.options.capture_sizes, at_start=not self.options.lazy_capture)

    # ------------------------------------------------------------ requests in

    @_in_turn
    def add(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        prompt: str | None = None,
        timeout: float | None = None,
        checked: bool = False,
    ) -> RequestGroup:
        """Queue the n answers to one prompt. `timeout` is in seconds from now.

        checked: `check_params` returned these parameters, which many prompts may then share.
        """
        params = params if checked else self.check_params(params)
        ids = self._check_prompt(prompt_ids)
        limit = self._check_fits(ids, params)
        if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, Real) or not timeout > 0):
            raise ValueError(f"timeout={timeout!r} is out of range: it must be more than 0 seconds, or None")
        deadline = None if timeout is None else time.monotonic() + timeout
        base = self._seeds.getrandbits(63) if params.seed in (None, -1) else int(params.seed)
        requests = [self._request(ids, params, base + child, limit, deadline) for child in range(params.n)]
        group = RequestGroup(request_id, prompt, ids, params, requests)
        for request in requests:
            if self._returns_routes(params):
                routers, _, k = self.cache.routed.shape
                request.routes = np.empty((request.most_tokens - 1, routers, k), dtype=np.int16)
            self._groups[request] = group
            self.scheduler.add(request)
        return group

    def _request(
        self, ids: list[int], params: SamplingParams, seed: int, max_tokens: int, deadline: float | None
    ) -> Request:
        eos, extra = self.tokens.eos_ids, frozenset(params.stop_token_ids or ())
        primary = None if params.ignore_eos or not eos else eos[0]
        stop_ids = extra if params.ignore_eos else extra | frozenset(eos[1:])
        include = params.include_stop_str_in_output
        stops = StopRules(primary, stop_ids, params.stop_strings, include, params.min_tokens, max_tokens)
        phrases = bad_word_ids(params.bad_words or (), lambda text: self.tokens.encode(text, special=False))
        self._arrivals += 1
        return Request(
            index=self._arrivals,
            prompt=ids,
            params=params,
            seed=(seed + 2**63) % 2**64 - 2**63,
            stops=stops,
            stop_ids=tuple(extra.union(eos)),
            banned_tokens=tuple(phrase[0] for phrase in phrases if len(phrase) == 1),
            rules=self._host_rules(params, [phrase for phrase in phrases if len(phrase) > 1]),
            detokenizer=self._detokenizer(ids, params),
            deadline=deadline,
        )

    def _host_rules(self, params: SamplingParams, phrases: list[tuple[int, ...]]) -> HostRules | None:
        grammar = None
        if params.structured_outputs is not None:
            self._grammars = self._grammars or GrammarCompiler(self.tokens)
            grammar = self._grammars.start(params.structured_outputs)
        processors = params.logits_processors or ()
        if not (grammar or phrases or processors):
            return None
        allowed = params.allowed_token_ids
        ends = [token for token in self.tokens.eos_ids if allowed is None or token in allowed]
        return HostRules(grammar, phrases, processors, ends)

    def _detokenizer(self, ids: list[int], params: SamplingParams) -> Detokenizer | None:
        if not params.detokenize or self.tokens.tokenizer is None:
            return None
        if not params.skip_special_tokens and not params.spaces_between_special_tokens:
            return Detokenizer(self.tokens.decode_spaceless, ids)
        return Detokenizer(lambda part: self.tokens.decode(part, params.skip_special_tokens), ids)

    def _check_prompt(self, prompt_ids: Sequence[int]) -> list[int]:
        ids, vocab = list(prompt_ids), self.model.dims.vocab
        if set(map(type, ids)) - {int}:
            ids = [_whole(token) for token in ids]
        if not ids:
            raise ValueError("the prompt is empty (0 tokens); it must have at least 1")
        if min(ids) < 0 or max(ids) >= vocab:
            outside = next(token for token in ids if not 0 <= token < vocab)
            raise ValueError(f"prompt token {outside} is out of range: this model has ids from 0 to {vocab - 1}")
        longest = self.options.max_model_len
        if len(ids) >= longest:
            raise ValueError(
                f"the prompt has {len(ids)} tokens and max_model_len is {longest}: at most {longest - 1} prompt tokens "
                "leave room for one more; shorten the prompt or raise max_model_len"
            )
        return ids

    def check_params(self, params: SamplingParams) -> SamplingParams:
        """A copy that stays as it is. Raises ValueError for what this engine cannot do."""
        params, vocab = params.clone(), self.model.dims.vocab
        params.validate()
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token in getattr(params, name) or ():
                if token >= vocab:
                    raise ValueError(f"{name} holds {token}, and this model has ids from 0 to {vocab - 1}")
                if token >= self.tokens.vocab and name != "allowed_token_ids":
                    raise ValueError(f"{name} holds {token}, which is padding (the tokenizer has {self.tokens.vocab} ids) and never drawn")
        if params.allowed_token_ids is not None and min(params.allowed_token_ids) >= self.tokens.vocab:
            raise ValueError(f"allowed_token_ids allows only padding ids (the tokenizer has {self.tokens.vocab})")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > vocab:
                raise ValueError(f"{name}={getattr(params, name)} is more than the vocabulary of {vocab}")
        if params.return_routed_experts and self.cache.routed is None:
            known = "give LLM(enable_return_routed_experts=True), which has every step record them"
            raise ValueError(
                f"return_routed_experts=True: {known if any(self.model.routed) else 'this model has no routed experts'}"
            )
        if params.stop_strings:
            self.tokens.require("stop")
        if params.bad_words:
            self.tokens.require("bad_words")
        return params

    def _returns_routes(self, params: SamplingParams) -> bool:
        asked = params.return_routed_experts
        return self.options.enable_return_routed_experts if asked is None else asked

    def _check_fits(self, ids: list[int], params: SamplingParams) -> int:
        """The most tokens the request may generate; raises where no empty pool could hold it."""
        room = self.options.max_model_len - len(ids)
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        chunk = self.options.max_num_batched_tokens
        for index, pool in enumerate(self.tables.pools):
            needed = self.tables.most_blocks(index, len(ids) + limit - 1, chunk)  # the last token is never written
            if needed > pool.pages:
                raise ValueError(
                    f"{len(ids)} prompt tokens and up to {limit} new ones take {needed} blocks of "
                    f"{self.options.block_size} tokens, and there are {pool.pages} in all; lower max_tokens or raise "
                    "num_gpu_blocks_override or gpu_memory_utilization"
                )
        return limit

    @_in_turn
    def abort(self, group: RequestGroup, stop_reason: str | None = None) -> None:
        """End a group's unfinished requests now and free all they hold; what they generated stays."""
        for request in group.requests:
            if not request.finished:
                self._finish(request, "abort", stop_reason)
                self.metrics.aborted_requests += 1

    # ------------------------------------------------------------ steps

    @property
    def unfinished(self) -> bool:
        return self.scheduler.unfinished

    @_in_turn
    def step(self) -> None:
        """Launch one step and read the tokens of the one before. Groups that grew have a higher `version`.

        If it raises, every request is aborted and everything is free.
        """
        started, completed = time.perf_counter(), False
        try:
            self._expire()
            busy = self._flight is not None
            lock_step = self.scheduler.lock_step
            if lock_step:
                self._read_flight()
            plan = self.scheduler.schedule(self._cache_root())
            launched = self.runner.launch(plan) if plan.rows else None
            self._count(plan)
            self._read_flight()
            self._flight = launched
            if not (busy or launched or not self.unfinished):
                raise AssertionError("no request can run: the scheduler is stuck")
            completed = True
        finally:
            if not completed:
                self.abort_all()
            self.metrics.step_seconds += time.perf_counter() - started

    @_in_turn
    def abort_all(self) -> None:
        """End every request and forget the step in flight and the prefix cache, which it may have spoilt."""
        self._flight = None
        for group in list(dict.fromkeys(self._groups.values())):
            self.abort(group)
        self.tables.forget_all()

    @_in_turn
    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; running requests keep their pages."""
        self.tables.forget_all()

    def _cache_root(self) -> bytes:
        return hashlib.blake2b(f"weights {self.model.weight_version}".encode(), digest_size=16).digest()

    def _expire(self) -> None:
        now = time.monotonic()
        late = [request for request in self._groups if request.deadline is not None and request.deadline <= now]
        for request in late:
            self._finish(request, "abort", "timeout")
            self.metrics.aborted_requests += 1

    def _count(self, plan: StepPlan) -> None:
        if not plan.rows:
            return
        in_prompt = [row for row in plan.rows if row.start < len(row.request.prompt)]
        prompt_tokens = sum(min(row.count, len(row.request.prompt) - row.start) for row in in_prompt)
        self.metrics.prefill_tokens += prompt_tokens
        self.metrics.prefill_steps += prompt_tokens > 0
        self.metrics.decode_steps += prompt_tokens == 0
        self.metrics.lock_step_steps += any(row.request.rules is not None for row in plan.rows)

    def all_metrics(self) -> dict[str, int | float]:
        """The counters since start, and free and total blocks (of the first group that has pages) and slots."""
        pool = self.tables.pools[0] if self.tables.pools else None
        return self.metrics.as_dict() | {
            "free_blocks": pool.free if pool else 0,
            "total_blocks": pool.pages if pool else 0,
            "free_slots": len(self.scheduler.free_slots),
            "total_slots": self.options.max_num_seqs,
            "running_requests": len(self.scheduler.running),
            "waiting_requests": len(self.scheduler.waiting),
        }

    # ------------------------------------------------------------ tokens out

    def _read_flight(self) -> None:
        flight, self._flight = self._flight, None
        if flight is None:
            return
        if flight.routes is not None:
            self._take_routes(flight.routes)
        for scores in flight.scores:
            self._take_scores(scores)
        if flight.values is None:
            return
        tokens, logprobs, ranks, top_ids, top_logprobs = flight.values.read()
        tops = repeat(((), ())) if top_ids is None else zip(top_ids, top_logprobs)
        for request, token, logprob, rank, top in zip(flight.requests, tokens, logprobs, ranks, tops):
            if request.finished:
                self.metrics.dropped_tokens += 1
            else:
                self._take(request, token, logprob, rank, top)

    def _take(
        self, request: Request, token: int, logprob: float, rank: int, top: tuple[Sequence[int], Sequence[float]]
    ) -> None:
        """Append one confirmed token and end the request if it says so. `top`: the most likely ids and their logprobs."""
        if fault := self._fault(request, token, logprob):
            request.error = f"token {request.produced} of request {self._groups[request].request_id} {fault}"
            self._finish(request, "error")
            return
        request.tokens.append(token)
        self.metrics.generated_tokens += 1
        self._groups[request].version += 1
        if request.logprobs is not None:
            request.logprobs.append(self._logprobs(token, logprob, rank, request.params.logprobs, *top))
            request.cumulative_logprob += logprob
        ending = request.stops.by_token(token, request.produced)
        if ending is None and request.rules is not None and request.rules.complete:
            ending = ("stop", None)
        if ending is not None:
            request.finish(*ending)
        if request.stops.strings:
            request.check_stop_strings()
        if request.finished:
            self._finish(request, request.finish_reason, request.stop_reason)

    def _fault(self, request: Request, token: int, logprob: float) -> str | None:
        """Why a token cannot be taken, None where it can; the request's own rules then know it."""
        fault = None if request.rules is None else request.rules.fault
        if fault is None and logprob != logprob:
            fault = "has no probability: the model's logits are NaN, or its rules together allow no token"
        if fault is None and request.rules is not None:
            fault = request.rules.accept(token)
        return fault

    def _finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        request.finish(reason, stop_reason)
        self.scheduler.remove(request)
        group = self._groups.pop(request)
        group.version += 1
        self.metrics.finished_requests += reason not in ("abort", "error")

    def _take_routes(self, routes: Routes) -> None:
        (values,) = routes.values.wait()
        of_rows = values.split([row.count for row in routes.rows])
        for row, experts in zip(routes.rows, of_rows):
            if row.request.routes is not None:
                row.request.take_routes(row.start, experts.numpy())

    def _take_scores(self, scores: PromptScores) -> None:
        request = scores.request
        tokens, logprobs, ranks, top_ids, top_logprobs = scores.values.read()
        for offset, token in enumerate(tokens):
            if scores.position + offset != len(request.prompt_logprobs):
                continue  # already known from before a preemption
            top = (top_ids[offset], top_logprobs[offset]) if top_ids is not None else ((), ())
            entry = self._logprobs(token, logprobs[offset], ranks[offset], request.params.prompt_logprobs, *top)
            request.prompt_logprobs.append(entry)

    def _logprobs(
        self,
        token: int,
        logprob: float,
        rank: int,
        wanted: int,
        top_ids: Sequence[int],
        top_logprobs: Sequence[float],
    ) -> TokenLogprobs:
        """The token itself first, then the `wanted` most likely ones (-1: all)."""
        decode = self.tokens.decode_token
        entry = {token: Logprob(logprob, rank, decode(token))}
        wanted = len(top_ids) if wanted == -1 else wanted
        for place, (other, value) in enumerate(zip(top_ids[:wanted], top_logprobs), start=1):
            if other != token:
                entry[other] = Logprob(value, place, decode(other))
        return entry


def _whole(token: Any) -> int:
    """A token id as it was given, if it is one."""
    try:
        if isinstance(token, bool):
            raise TypeError
        return operator.index(token)
    except TypeError:
        raise ValueError(f"prompt token {token!r} is a {type(token).__name__}, and must be a whole number") from None
