"""An engine that many callers share: one thread owns it, each caller awaits its own outputs."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Self

from flexgen.errors import FlexgenError
from flexgen.runtime.arguments import EngineArgs
from flexgen.runtime.engine import Engine
from flexgen.runtime.llm import LLM
from flexgen.runtime.loading.merging import AdapterUpdate
from flexgen.runtime.loading.updates import Source, Update
from flexgen.runtime.requests.outputs import GenerationError, RequestOutput
from flexgen.runtime.requests.params import LoRARequest, RequestOutputKind, SamplingParams
from flexgen.runtime.requests.prompts import Prompt, parse_prompt
from flexgen.runtime.requests.request import RequestGroup
from flexgen.runtime.surface import REFUSED_ASYNC_METHODS, refusal

_CLOSED = "this AsyncEngine is closed"


class _Stream:
    """One caller's outputs, handed from the engine's thread to the caller's event loop. `group` is None until it is added."""

    def __init__(self, request_id: str, loop: asyncio.AbstractEventLoop) -> None:
        self.request_id, self.version = request_id, 0
        self.group: RequestGroup | None = None
        self._loop, self._items = loop, asyncio.Queue[RequestOutput | Exception]()

    def put(self, item: RequestOutput | Exception) -> bool:
        """-> whether somebody may still take it: False once the caller's loop is closed."""
        try:
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)
        except RuntimeError:  # what asyncio raises on a closed loop
            if not self._loop.is_closed():
                raise
            return False
        return True

    async def get(self) -> RequestOutput:
        item = await self._items.get()
        if isinstance(item, Exception):
            raise item
        return item


class _Job:
    """Work for the engine's thread. Its future is claimed before the work, so that a cancelled caller's is never run."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        self._work = work

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._work())
        except Exception as error:
            self.future.set_exception(error)
        except BaseException as error:
            self.future.set_exception(_ended(error))
            raise

    def refuse(self, error: Exception) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class AsyncEngine:
    """`async for output in engine.generate(prompt, params, request_id)`, from any number of tasks.

    Takes the arguments of `LLM`. If a step fails, every caller gets the error and the engine goes on with new requests. If
    the engine's thread ends, every caller that waits gets the cause, and so does every later call.
    """

    def __init__(self, model: Any, **arguments: Any) -> None:
        self._llm = LLM(model, **arguments)
        self._engine: Engine = self._llm.llm_engine
        self._streams: dict[str, _Stream] = {}
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._ended: FlexgenError | None = None
        self._closing = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="flexgen-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """An engine of the arguments that an `AsyncEngineArgs` holds."""
        return cls(engine_args.model, **engine_args.arguments)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str,
        lora_request: LoRARequest | None = None,
        timeout: float | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the answer as it grows (by the parameters' `output_kind`); a caller that stops listening aborts it.

        Raises ValueError for a prompt, parameter or request_id that cannot be served, and GenerationError, which holds
        what there is of the answers, for one that failed while it ran.
        """
        if not isinstance(request_id, str):
            raise TypeError(f"request_id is {request_id!r}, and must be text")
        stream = _Stream(request_id, asyncio.get_running_loop())
        text, ids = parse_prompt(prompt, self._engine.tokens)
        params = self._llm.get_default_sampling_params() if sampling_params is None else sampling_params
        (first,) = self._engine.admission.check_priorities([priority], 1)
        adding = self._submit(lambda: self._add(stream, ids, params, text, timeout, first, lora_request))
        try:
            await asyncio.wrap_future(adding)
            while True:
                output = await stream.get()
                yield output
                if output.finished:
                    return
        finally:
            self._abandon(stream, adding)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End a request, or several, now; callers get what was generated, with finish_reason "abort". Unknown ids do nothing."""
        for each in [request_id] if isinstance(request_id, str) else list(request_id):
            await self._on_thread(partial(self._abort, each))

    @property
    def model_config(self) -> Any:
        return self._engine.model_config

    @property
    def is_running(self) -> bool:
        """Whether it takes requests."""
        return self._ended is None and not self._closing

    @property
    def is_stopped(self) -> bool:
        return not self.is_running

    @property
    def errored(self) -> bool:
        """Whether its thread ended by an error."""
        return self.dead_error is not None

    @property
    def dead_error(self) -> BaseException | None:
        return None if self._ended is None else self._ended.__cause__

    async def check_health(self) -> None:
        """Raises FlexgenError, with the cause, where it serves no more."""
        if not self.is_running:
            raise FlexgenError(str(self._ended or _CLOSED)) from self.dead_error

    def shutdown(self, timeout: float | None = None) -> None:
        """`close`, under vLLM's name. Ending takes a step at most, whatever `timeout` says."""
        self.close()

    async def is_sleeping(self) -> bool:
        return False

    async def reset_mm_cache(self) -> None:
        """Nothing to forget: prompts hold no images."""

    async def get_default_sampling_params(self) -> SamplingParams:
        return self._llm.get_default_sampling_params()

    def __getattr__(self, name: str) -> Any:
        """What vLLM's engine has and this one has not says so by name when it is called."""
        return refusal("AsyncEngine", name, REFUSED_ASYNC_METHODS)

    def metrics(self) -> dict[str, int | float]:
        return self._llm.metrics()

    def report(self) -> str:
        return self._llm.report()

    def get_tokenizer(self) -> Any:
        return self._llm.get_tokenizer()

    async def reset_prefix_cache(self) -> bool:
        return await self._on_thread(self._llm.reset_prefix_cache)

    async def load_weights(self, source: Source, on_running: str = "wait") -> Update:
        """`LLM.load_weights` between two steps; what runs is answered, or aborted, to those who await it."""
        return await self._on_thread(lambda: self._between(on_running, lambda how: self._llm.load_weights(source, how)))

    async def receive_weights(self, source: int, group: Any = None, on_running: str = "wait") -> Update:
        """`LLM.receive_weights` between two steps. Requests wait until the sender is done."""
        return await self._on_thread(lambda: self._between(on_running, lambda how: self._llm.receive_weights(source, group, how)))

    async def reload_weights(self, on_running: str = "wait") -> Update:
        return await self._on_thread(lambda: self._between(on_running, self._llm.reload_weights))

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter before a request brings it."""
        return await self._on_thread(lambda: self._engine.add_lora(lora_request))

    async def remove_lora(self, lora_id: int) -> bool:
        return await self._on_thread(lambda: self._engine.remove_lora(lora_id))

    async def pin_lora(self, lora_id: int) -> bool:
        return await self._on_thread(lambda: self._engine.pin_lora(lora_id))

    async def list_loras(self) -> set[int]:
        return await self._on_thread(self._engine.list_loras)

    async def load_adapter(
        self, adapter: Any, name: str | None = None, config: Any = None, on_running: str = "wait"
    ) -> AdapterUpdate:
        """`LLM.load_adapter` between two steps."""
        return await self._on_thread(
            lambda: self._between(on_running, lambda how: self._llm.load_adapter(adapter, name, config, how))
        )

    async def refresh_adapter(
        self, name: str | None = None, adapter: Any = None, config: Any = None, on_running: str = "wait"
    ) -> AdapterUpdate:
        return await self._on_thread(
            lambda: self._between(on_running, lambda how: self._llm.refresh_adapter(name, adapter, config, how))
        )

    async def unload_adapter(self, name: str | None = None, on_running: str = "wait") -> AdapterUpdate:
        return await self._on_thread(lambda: self._between(on_running, lambda how: self._llm.unload_adapter(name, how)))

    def close(self) -> None:
        """Abort everything and stop the thread. Callers that still listen get their outputs so far."""
        self._check_process()
        with self._gate:
            if self._ended is None and not self._closing:
                self._closing = True
                self._jobs.put(_Job(self._shut))
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Run `work` on the engine's thread, between two steps."""
        self._check_process()
        job = _Job(work)
        with self._gate:
            if self._ended is not None or self._closing:
                raise FlexgenError(str(self._ended or _CLOSED)) from (self._ended and self._ended.__cause__)
            self._jobs.put(job)
        return job.future

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise FlexgenError(
                f"this AsyncEngine belongs to process {self._process}, and a fork has no thread to run it: make an engine "
                "in the process that uses it"
            )

    async def _on_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self._submit(work))

    def _abandon(self, stream: _Stream, adding: Future[Any]) -> None:
        """End what a caller that listens no more has left: a request that waits to be added, is being added, or runs."""
        adding.cancel()
        if (stream.group is not None and stream.group.finished) or os.getpid() != self._process:
            return
        with self._gate:
            if self._ended is None and not self._closing:
                self._jobs.put(_Job(lambda: self._end(stream)))

    def _run(self) -> None:
        """Until it is closed. Whatever ends it, nobody waits for it any more."""
        ended = FlexgenError(_CLOSED)
        try:
            while not (self._closing and self._jobs.empty() and not self._engine.unfinished):
                self._do_jobs(wait=not self._engine.unfinished)
                if self._engine.unfinished:
                    self._step()
        except BaseException as error:
            ended = _ended(error)
            raise
        finally:
            self._give_up(ended)

    def _give_up(self, error: FlexgenError) -> None:
        """Fail everybody who waits, now and later."""
        with self._gate:
            self._ended = error
        while not self._jobs.empty():
            self._jobs.get().refuse(error)
        for stream in self._streams.values():
            stream.put(error)
        self._streams.clear()

    def _do_jobs(self, wait: bool) -> None:
        if wait:
            self._jobs.get().run()
        while not self._jobs.empty():
            self._jobs.get().run()

    def _add(
        self,
        stream: _Stream,
        ids: Sequence[int],
        params: SamplingParams,
        text: str | None,
        timeout: float | None,
        priority: int,
        lora_request: LoRARequest | None,
    ) -> None:
        if stream.request_id in self._streams:
            raise ValueError(f"request_id={stream.request_id!r} is running already; ids must differ")
        stream.group = self._engine.add(stream.request_id, ids, params, text, timeout, False, priority, lora_request)
        self._streams[stream.request_id] = stream

    def _abort(self, request_id: str) -> None:
        if request_id in self._streams:
            self._engine.abort(self._streams[request_id].group)
            self._deliver()

    def _end(self, stream: _Stream) -> None:
        """Forget a stream that nobody reads, and end its request."""
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
            self._engine.abort(stream.group)

    def _between(self, on_running: str, work: Callable[[str], Any]) -> Any:
        """Run `work`, whose argument is on_running, and give callers what it ended."""
        while on_running == "wait" and self._engine.unfinished:
            self._step()
        try:
            return work(on_running)
        finally:
            self._deliver()

    def _shut(self) -> None:
        self._engine.abort_all()
        self._deliver()

    def _step(self) -> None:
        try:
            self._engine.step()
        except Exception as error:  # it belongs to the callers, whatever it is; the thread must outlive it
            for stream in self._streams.values():
                stream.put(error)
            self._streams.clear()
        self._deliver()

    def _deliver(self) -> None:
        for stream in list(self._streams.values()):
            group = stream.group
            assert group is not None  # streams are listed once they are added
            if group.version == stream.version:
                continue
            stream.version = group.version
            try:
                heard = self._hand_over(stream)
            except Exception as error:  # of this answer's text, say: it is its caller's alone
                heard = False
                stream.put(error)
            if not heard:
                self._end(stream)

    def _hand_over(self, stream: _Stream) -> bool:
        """Give a stream's caller what is new. -> whether somebody may still listen."""
        group = stream.group
        assert group is not None
        if group.finished:
            del self._streams[stream.request_id]
            output = group.output()
            stream.put(GenerationError(group.error, [output]) if group.error else output)
        elif group.params.output_kind is not RequestOutputKind.FINAL_ONLY:
            return stream.put(group.output())
        return True


AsyncLLMEngine = AsyncEngine
"""vLLM's name."""


def _ended(error: BaseException) -> FlexgenError:
    ended = FlexgenError(f"the engine's thread ended: {type(error).__name__}: {error}; make another AsyncEngine")
    ended.__cause__ = error
    return ended
