"""The engine: requests in, steps, tokens out. `LLM` and `AsyncEngine` are two ways to drive it."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import repeat
from types import SimpleNamespace
from typing import Any, cast

from flexgen.errors import FlexgenError
from flexgen.runtime.execution import start
from flexgen.runtime.execution.runner import InFlight, Runner
from flexgen.runtime.execution.step import DeviceStep
from flexgen.runtime.execution.tables import SlotTables
from flexgen.runtime.loading.attached import Attached
from flexgen.runtime.loading.lora import AdapterError
from flexgen.runtime.loading.merging import AdapterUpdate, Merger
from flexgen.runtime.loading.model import Model
from flexgen.runtime.loading.registry import AdapterRegistry
from flexgen.runtime.loading.sharing import Shared, SharingError
from flexgen.runtime.loading.updates import Source, Update, UpdateError, Updater, incomplete
from flexgen.runtime.options import EngineOptions
from flexgen.runtime.requests.admission import Admission
from flexgen.runtime.requests.outputs import token_logprobs
from flexgen.runtime.requests.params import LoRARequest, SamplingParams
from flexgen.runtime.requests.request import Request, RequestGroup
from flexgen.runtime.requests.tokens import Tokens
from flexgen.runtime.sampling.sampler import SamplingTables
from flexgen.runtime.scheduling.metrics import Metrics
from flexgen.runtime.scheduling.pages import BlockTables
from flexgen.runtime.scheduling.pools import Cache, has_recurrent_state, page_groups
from flexgen.runtime.scheduling.scheduler import Scheduler, StepPlan
from flexgen.runtime.scheduling.sizing import size_pools
from flexgen.runtime.served import ServedModel

log = logging.getLogger(__name__)

ON_RUNNING = ("wait", "abort", "pause", "raise")
"""What an update of the weights does to requests that run."""


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

    def __init__(self, model: ServedModel, tokens: Tokens, options: EngineOptions) -> None:
        self.model, self.tokens, self.options = model, tokens, options
        self._turn = threading.RLock()
        self._groups: dict[Request, RequestGroup] = {}
        self._flight: InFlight | None = None
        self._updater: Updater | None = None
        self._merger: Merger | None = None
        self.shared: Shared | None = None
        self.metrics = Metrics()
        self.prefix_caching = _prefix_caching(model, options)
        self.adapters = _adapters(model, options)
        self.cache = _cache(model, options)
        windows = [group.geometry.window for group in self.cache.groups]
        self.tables = BlockTables(self.cache.pages, windows, options.block_size, self.prefix_caching)
        self.scheduler = Scheduler(self.tables, options.max_num_seqs, options.max_num_batched_tokens, self.metrics, options.max_loras)
        self.admission = Admission(
            tokens, options, model.dims.vocab, any(model.routers), self.cache.recorded_shape, self.tables.check_fits
        )
        model.make_rope_tables(options.max_model_len)
        attached = None if self.adapters is None else self.adapters.attached
        self.runner = Runner(_device_step(model, self.cache, tokens.vocab, options, attached))
        if self.adapters is not None:
            self.runner.place_adapter = self.adapters.place
        self.startup = {"load": model.load_seconds, "compile": 0.0, "capture": 0.0}
        if model.device.type == "cuda" and not options.enforce_eager:
            self.runner.graphs = start.start(self.runner.step, options, self.startup)

    @_in_turn
    def add(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        prompt: str | None = None,
        timeout: float | None = None,
        checked: bool = False,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> RequestGroup:
        """Queue the n answers to one prompt. `timeout` is in seconds from now.

        checked: `admission.check_params` returned these parameters, which many prompts may then share.
        """
        if self.model.missing_weights:
            raise UpdateError(incomplete(self.model.missing_weights))
        params = params if checked else self.admission.check_params(params)
        group = self.admission.admit(request_id, prompt_ids, params, prompt, timeout, priority)
        if lora_request is not None:
            self._bring(group, lora_request)
        for request in group.requests:
            self._groups[request] = group
            self.scheduler.add(request)
        return group

    def _bring(self, group: RequestGroup, lora_request: LoRARequest) -> None:
        """Let a group that is not queued yet run with an adapter."""
        registry = self._registry()
        if registry.wants_reading(lora_request):
            self.add_lora(lora_request)
        group.lora_request, key = lora_request, registry.use(lora_request.lora_int_id)
        for request in group.requests:
            request.adapter, request.adapter_key = lora_request.lora_int_id, key

    def _registry(self) -> AdapterRegistry:
        if self.adapters is None:
            raise ValueError("lora_request needs LLM(enable_lora=True), which makes room for adapters; load_adapter merges one for all")
        return self.adapters

    @_in_turn
    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter before a request brings it, or again with `load_inplace`. -> whether it was read.

        Raises AdapterError for what does not fit, and for one whose requests have not ended.
        """
        registry, number = self._registry(), lora_request.lora_int_id
        if not registry.wants_reading(lora_request):
            return False
        self._check_idle(number)
        self._make_room(registry, number)
        registry.read(lora_request)
        self.scheduler.adapters.forget(number)
        return True

    def _make_room(self, registry: AdapterRegistry, number: int) -> None:
        """Let the adapter used longest ago go where one more would be too many to keep."""
        most = self.options.max_cpu_loras
        if most is None or number in registry.numbers or len(registry.numbers) < most:
            return
        oldest = registry.oldest({request.adapter for request in self._groups} | self.scheduler.adapters.pinned)
        if oldest is None:
            raise AdapterError(
                f"max_cpu_loras={most} adapters are kept, and each is pinned or has answers that have not ended: raise it, or "
                "wait for some of them"
            )
        self.scheduler.adapters.forget(oldest)
        registry.remove(oldest)

    @_in_turn
    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter. -> whether there was one of this number."""
        self._check_idle(lora_id)
        self.scheduler.adapters.forget(lora_id)
        self.scheduler.adapters.pinned.discard(lora_id)
        return self._registry().remove(lora_id)

    @_in_turn
    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter, and its slot once it has one, until `remove_lora`. Raises AdapterError for one that was not read."""
        slots = self.scheduler.adapters
        if lora_id not in self._registry().numbers:
            raise AdapterError(f"there is no adapter {lora_id} to pin; there are {sorted(self._registry().numbers)}: add_lora reads one")
        if not slots.can_pin(lora_id):
            raise AdapterError(
                f"adapter {lora_id} cannot be pinned beside {sorted(slots.pinned - {lora_id})}: max_loras={self.options.max_loras}, "
                "and one slot stays free for other adapters; raise it"
            )
        slots.pinned.add(lora_id)
        return True

    def list_loras(self) -> set[int]:
        return self._registry().numbers

    def _check_idle(self, number: int) -> None:
        running = sum(request.adapter == number for request in self._groups)
        if running:
            raise AdapterError(f"adapter {number} is that of {running} answers that have not ended: finish or abort them first")

    @property
    def model_config(self) -> SimpleNamespace:
        """vLLM's description of what is served."""
        directory = getattr(self.model, "directory", None)
        return SimpleNamespace(
            model=None if directory is None else str(directory), max_model_len=self.options.max_model_len, seed=self.options.seed,
            dtype=self.model.dtype, hf_config=SimpleNamespace(**self.model.config), logprobs_mode=self.options.logprobs_mode,
            enable_sleep_mode=False, get_vocab_size=lambda: self.model.dims.vocab,
        )  # fmt: skip

    @property
    def vllm_config(self) -> SimpleNamespace:
        names = ("max_loras", "max_lora_rank", "max_cpu_loras")
        room = SimpleNamespace(**{name: getattr(self.options, name) for name in names}) if self.options.enable_lora else None
        return SimpleNamespace(model_config=self.model_config, lora_config=room)

    @property
    def model_executor(self) -> SimpleNamespace:
        """vLLM's way to `load_weights`, as trainers write it: `model_executor.driver_worker.model_runner.model.load_weights`."""
        runner = SimpleNamespace(model=self)
        return SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))

    @_in_turn
    def load_weights(self, source: Source, on_running: str = "wait") -> Update:
        """Write new weights in place, between two steps. Raises UpdateError for what does not fit.

        on_running: requests that run are finished first ("wait"), aborted ("abort"), preempted ("pause": they go on with the new
        weights, which compute again what they hold), or an error ("raise").
        """
        self._updater = self._updater or Updater(cast(Model, self.model))
        self._settle(on_running)
        return self._updater.load(source)

    @_in_turn
    def receive_weights(self, source: int, group: Any = None, on_running: str = "wait") -> Update:
        """Write what `loading.remote.send_weights` broadcasts from the process of rank `source`."""
        from flexgen.runtime.loading.remote import Receiver  # torch.distributed, for those who use it

        self._updater = self._updater or Updater(cast(Model, self.model))
        self._settle(on_running)
        return self._updater.receive(Receiver(source, self.model.device, group))

    @_in_turn
    def weights_changed(self, on_running: str = "wait") -> Counter[str]:
        """After a trainer changed the tensors that it shares: derive and cache anew. -> tensors that are shared, by role.

        It says nothing of a load that failed half-way: only a complete set ends that.

        Raises SharingError for a tensor that is the engine's no longer.
        """
        if self.shared is None:
            raise SharingError("no trainer shares this engine's weights: LLM.from_model makes one that does")
        self._settle(on_running)
        counts = self.shared.check()
        cast(Model, self.model).weights_written()
        return counts

    @_in_turn
    def load_adapter(self, source: Any, name: str | None = None, config: Any = None, on_running: str = "wait") -> AdapterUpdate:
        """Merge an adapter into what the layers read, between two steps. Raises AdapterError, and then changes nothing."""
        return self._merge(on_running, lambda merger: merger.load(source, name, config))

    @_in_turn
    def refresh_adapter(
        self, name: str | None = None, source: Any = None, config: Any = None, on_running: str = "wait"
    ) -> AdapterUpdate:
        """Read a merged adapter again, from where it came or from `source`."""
        return self._merge(on_running, lambda merger: merger.refresh(name, source, config))

    @_in_turn
    def unload_adapter(self, name: str | None = None, on_running: str = "wait") -> AdapterUpdate:
        """Take a merged adapter out: what it alone changed is the pristine weight again, bit for bit."""
        return self._merge(on_running, lambda merger: merger.unload(name))

    def _merge(self, on_running: str, change: Callable[[Merger], AdapterUpdate]) -> AdapterUpdate:
        """Change merged adapters. Where a layer reads a new tensor since, what is captured is captured again."""
        model = cast(Model, self.model)
        self._merger = self._merger or Merger(model)
        self._settle(on_running)
        copies = len(model.pristine)
        try:
            return change(self._merger)
        finally:
            if self.runner.graphs is not None and len(model.pristine) != copies:
                self.runner.graphs.renew(at_once=not self.options.lazy_capture)

    def _settle(self, on_running: str) -> None:
        """Bring requests to an end, and read the step in flight, before weights change."""
        if on_running not in ON_RUNNING:
            raise ValueError(f"on_running is {on_running!r}, and must be one of {', '.join(ON_RUNNING)}")
        if self.unfinished and on_running == "raise":
            raise FlexgenError(
                f"{len(self._groups)} answers are running, and weights change only between requests: finish or abort them, "
                "or say on_running='wait', 'abort' or 'pause'"
            )
        if on_running == "abort":
            self.abort_all()
        while self.unfinished and on_running != "pause":
            self.step()
        self._read_flight()
        self.scheduler.preempt_all()

    @_in_turn
    def abort(self, group: RequestGroup, stop_reason: str | None = None) -> None:
        """End a group's unfinished requests now and free all they hold; what they generated stays."""
        for request in group.requests:
            if not request.finished:
                self._finish(request, "abort", stop_reason)
                self.metrics.aborted_requests += 1

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
            if self.model.missing_weights and self.unfinished:
                raise UpdateError(incomplete(self.model.missing_weights))
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
        if plan.rows:
            self.metrics.prefill_tokens += plan.prompt_tokens
            self.metrics.prefill_steps += plan.prompt_tokens > 0
            self.metrics.decode_steps += plan.prompt_tokens == 0
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

    def _read_flight(self) -> None:
        """Wait for the step in flight and give its requests what it found."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        if flight.routes is not None:
            flight.routes.hand_over()
        for scores in flight.scores:
            scores.hand_over(self.tokens.decode_token)
        if flight.values is None:
            return
        *columns, top_ids, top_logprobs = flight.values.read()
        tops = repeat(((), ())) if top_ids is None else zip(top_ids, top_logprobs or ())
        for request, chosen, top in zip(flight.requests, zip(*columns), tops):
            if request.finished:
                self.metrics.dropped_tokens += 1
            else:
                self._take(request, chosen, top)

    def _take(
        self, request: Request, chosen: tuple[int, float, int], top: tuple[Sequence[int], Sequence[float]]
    ) -> None:
        """One token, its logprob and rank, and the ids and logprobs of the most likely ones."""
        token, logprob, _ = chosen
        if fault := self._fault(request, token, logprob):
            request.error = f"token {request.produced} of request {self._groups[request].request_id} {fault}"
            self._finish(request, "error")
            return
        self.metrics.generated_tokens += 1
        self._groups[request].version += 1
        listed = None
        if request.params.logprobs is not None:
            listed = token_logprobs(chosen, top, request.params.logprobs, self.tokens.decode_token)
        request.take(token, logprob, listed)
        if request.finish_reason is not None:
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


def _prefix_caching(model: ServedModel, options: EngineOptions) -> bool:
    wanted = options.enable_prefix_caching is not False
    if wanted and has_recurrent_state(model.state):
        level = logging.WARNING if options.enable_prefix_caching else logging.INFO
        log.log(level, "prefix caching is off: this model has recurrent state, which is not kept at block ends")
        return False
    return wanted


def _adapters(model: ServedModel, options: EngineOptions) -> AdapterRegistry | None:
    """Room for the adapters of requests, before memory is measured for pages."""
    if not options.enable_lora:
        return None
    tokens = options.max_num_batched_tokens + options.max_num_seqs + 1  # a step's, and its padding
    attached = Attached(cast(Model, model), options.max_loras, options.max_lora_rank, tokens, options.lora_target_modules)
    return AdapterRegistry(attached)


def _cache(model: ServedModel, options: EngineOptions) -> Cache:
    groups = page_groups(model.mixers, model.state)
    pages = size_pools(model, groups, options)
    routed_tokens = options.max_num_batched_tokens + 1 if options.enable_return_routed_experts else 0
    if routed_tokens and not any(model.routers):
        raise ValueError("enable_return_routed_experts=True, and this model has no routed experts; leave it out")
    return Cache(model, groups, pages, options.block_size, options.max_num_seqs, routed_tokens)


def _device_step(model: ServedModel, cache: Cache, real_vocab: int, options: EngineOptions, adapters: Attached | None) -> DeviceStep:
    blocks = -(-options.max_model_len // options.block_size)
    tables = SlotTables(options.max_num_seqs, len(cache.groups), blocks, model.device, adapters is not None)
    sampling = SamplingTables(options.max_num_seqs, model.dims.vocab, model.device)
    raw_logprobs = options.logprobs_mode == "raw_logprobs"
    return DeviceStep(model, cache, tables, sampling, real_vocab, raw_logprobs, adapters)
