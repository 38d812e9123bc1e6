"""An engine that many callers share: one thread steps it, each caller awaits its own outputs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

from flexgen.runtime.engine import Engine
from flexgen.runtime.errors import FlexgenError
from flexgen.runtime.llm import LLM, Prompt, parse_prompt
from flexgen.runtime.outputs import RequestOutput
from flexgen.runtime.params import LoRARequest, RequestOutputKind, SamplingParams
from flexgen.runtime.requests import RequestGroup

_Item = RequestOutput | BaseException


class _Stream:
    """One caller's outputs, handed from the engine's thread to the caller's event loop."""

    def __init__(self, group: RequestGroup, loop: asyncio.AbstractEventLoop) -> None:
        self.group, self.version = group, 0
        self._loop, self._queue = loop, asyncio.Queue[_Item]()

    def put(self, item: _Item) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    async def get(self) -> RequestOutput:
        item = await self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item


class AsyncEngine:
    """`async for output in engine.generate(prompt, params, request_id)`, from any number of tasks.

    Takes the arguments of `LLM`. If a step fails, every caller gets the error and the engine goes on with new requests.
    """

    def __init__(self, model: Any, **arguments: Any) -> None:
        self._llm = LLM(model, **arguments)
        self._engine: Engine = self._llm.engine
        self._lock = threading.Lock()
        """Held by whoever touches the engine; callers wait for at most one step."""
        self._wake = threading.Event()
        self._streams: dict[str, _Stream] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="flexgen-engine", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the answer as it grows (by `sampling_params.output_kind`); a caller that stops listening aborts it.

        Raises ValueError for a prompt, parameter or request_id that cannot be served.
        """
        if lora_request is not None:
            raise NotImplementedError("lora_request is not supported yet")
        stream = await asyncio.to_thread(self._add, prompt, sampling_params, request_id, timeout, asyncio.get_running_loop())
        try:
            while True:
                output = await stream.get()
                yield output
                if output.finished:
                    return
        finally:
            if not stream.group.finished:
                await self.abort(request_id)

    async def abort(self, request_id: str) -> None:
        """End a request now; its caller gets what was generated, with finish_reason "abort". Unknown ids do nothing."""
        await asyncio.to_thread(self._abort, request_id)

    def metrics(self) -> dict[str, int | float]:
        with self._lock:
            return self._llm.metrics()

    def report(self) -> str:
        with self._lock:
            return self._llm.report()

    def get_tokenizer(self) -> Any:
        return self._llm.get_tokenizer()

    def close(self) -> None:
        """Abort everything and stop the thread."""
        with self._lock:
            self._closed = True
            self._engine.abort_all()
            self._deliver()
        self._wake.set()
        self._thread.join()

    def _add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        timeout: float | None,
        loop: asyncio.AbstractEventLoop,
    ) -> _Stream:
        text, ids = parse_prompt(prompt, self._engine.tokens)
        with self._lock:
            if self._closed:
                raise FlexgenError("this AsyncEngine is closed")
            if request_id in self._streams:
                raise ValueError(f"request_id={request_id!r} is running already; ids must differ")
            stream = _Stream(self._engine.add(request_id, ids, params, text, timeout), loop)
            self._streams[request_id] = stream
        self._wake.set()
        return stream

    def _abort(self, request_id: str) -> None:
        with self._lock:
            stream = self._streams.get(request_id)
            if stream is not None:
                self._engine.abort(stream.group)
                self._deliver()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            with self._lock:
                if self._closed:
                    return
                if not self._engine.unfinished:
                    self._wake.clear()
                    continue
                self._step()

    def _step(self) -> None:
        try:
            self._engine.step()
        except Exception as error:  # whatever it was, it belongs to the callers, not to this thread
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

