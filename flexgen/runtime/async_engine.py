"""An engine that many callers share: one thread owns it, each caller awaits its own outputs."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any

from flexgen.errors import FlexgenError
from flexgen.runtime.engine import Engine
from flexgen.runtime.llm import LLM
from flexgen.runtime.loading.updates import Source, Update
from flexgen.runtime.requests.outputs import RequestOutput
from flexgen.runtime.requests.params import LoRARequest, RequestOutputKind, SamplingParams
from flexgen.runtime.requests.prompts import Prompt, parse_prompt
from flexgen.runtime.requests.request import RequestGroup


class _Stream:
    """One caller's outputs, handed from the engine's thread to the caller's event loop."""

    def __init__(self, group: RequestGroup, loop: asyncio.AbstractEventLoop) -> None:
        self.group, self.version = group, 0
        self._loop, self._items = loop, asyncio.Queue[RequestOutput | Exception]()

    def put(self, item: RequestOutput | Exception) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    async def get(self) -> RequestOutput:
        item = await self._items.get()
        if isinstance(item, Exception):
            raise item
        return item


class AsyncEngine:
    """`async for output in engine.generate(prompt, params, request_id)`, from any number of tasks.

    Takes the arguments of `LLM`. If a step fails, every caller gets the error and the engine goes on with new requests.
    """

    def __init__(self, model: Any, **arguments: Any) -> None:
        self._llm = LLM(model, **arguments)
        self._engine: Engine = self._llm.llm_engine
        self._streams: dict[str, _Stream] = {}
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="flexgen-engine", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str,
        lora_request: LoRARequest | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the answer as it grows (by the parameters' `output_kind`); a caller that stops listening aborts it.

        Raises ValueError for a prompt, parameter or request_id that cannot be served.
        """
        if lora_request is not None:
            raise NotImplementedError("lora_request is not supported yet")
        loop = asyncio.get_running_loop()
        text, ids = parse_prompt(prompt, self._engine.tokens)
        params = SamplingParams() if sampling_params is None else sampling_params
        stream = await self._on_thread(lambda: self._add(request_id, ids, params, text, timeout, loop))
        try:
            while True:
                output = await stream.get()
                yield output
                if output.finished:
                    return
        finally:
            if not stream.group.finished and not self._closed:
                self._submit(lambda: self._abort(request_id))

    async def abort(self, request_id: str) -> None:
        """End a request now; its caller gets what was generated, with finish_reason "abort". Unknown ids do nothing."""
        await self._on_thread(lambda: self._abort(request_id))

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

    async def reload_weights(self, on_running: str = "wait") -> Update:
        return await self._on_thread(lambda: self._between(on_running, self._llm.reload_weights))

    def close(self) -> None:
        """Abort everything and stop the thread. Callers that still listen get their outputs so far."""
        if not self._closed:
            self._submit(self._shut)
            self._thread.join()

    # ------------------------------------------------------------ on the caller's side

    def _submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Run `work` on the engine's thread, between two steps."""
        if self._closed:
            raise FlexgenError("this AsyncEngine is closed")
        future: Future[Any] = Future()

        def job() -> None:
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

        self._jobs.put(job)
        return future

    async def _on_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self._submit(work))

    # ------------------------------------------------------------ on the engine's thread

    def _run(self) -> None:
        while not self._closed:
            self._do_jobs(wait=not self._engine.unfinished)
            if self._engine.unfinished:
                self._step()

    def _do_jobs(self, wait: bool) -> None:
        if wait:
            self._jobs.get()()
        while not self._jobs.empty():
            self._jobs.get()()

    def _add(
        self,
        request_id: str,
        ids: list[int],
        params: SamplingParams,
        text: str | None,
        timeout: float | None,
        loop: asyncio.AbstractEventLoop,
    ) -> _Stream:
        if request_id in self._streams:
            raise ValueError(f"request_id={request_id!r} is running already; ids must differ")
        stream = _Stream(self._engine.add(request_id, ids, params, text, timeout), loop)
        self._streams[request_id] = stream
        return stream

    def _abort(self, request_id: str) -> None:
        if request_id in self._streams:
            self._engine.abort(self._streams[request_id].group)
            self._deliver()

    def _between(self, on_running: str, work: Callable[[str], Any]) -> Any:
        """Run `work`, whose argument is on_running, and give callers what it ended."""
        while on_running == "wait" and self._engine.unfinished:
            self._step()
        try:
            return work(on_running)
        finally:
            self._deliver()

    def _shut(self) -> None:
        self._closed = True
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
        for request_id, stream in list(self._streams.items()):
            group = stream.group
            if group.version == stream.version:
                continue
            stream.version = group.version
            if group.finished:
                del self._streams[request_id]
            if group.error:
                stream.put(FlexgenError(group.error))
            elif group.finished or group.params.output_kind is not RequestOutputKind.FINAL_ONLY:
                stream.put(group.output())
