"""Conversations to text by a checkpoint's chat template, with bounds: a template is code of whoever wrote the checkpoint.

`Tokens.chat` calls `render`. The text is transformers' own; it is made in a process beside this one (`template_worker`), which is
started once and ended when a template takes too long.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flexgen.contract.json_files import shown
from flexgen.errors import FlexgenError
from flexgen.runtime.requests.template_worker import LENGTH

SECONDS = 5.0
"""The longest that one conversation may take to render."""

_START_SECONDS = 120.0

_OURS = frozenset(
    {"conversation", "conversations", "messages", "tokenize", "return_dict", "return_tensors", "padding", "truncation", "max_length"}
    | {"tokenizer_kwargs", "return_assistant_tokens_mask", "sanitize_control_tokens"}
)
"""Arguments of transformers' apply_chat_template that say what it returns: here that is always token ids."""


_DEFAULTS = {"chat_template": None, "tools": None, "add_generation_prompt": True, "continue_final_message": False}


class TemplateError(ValueError):
    """A chat template that cannot render a conversation: it raised, ran too long, or wrote too much."""


def options(explicit: Mapping[str, Any], extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """The arguments of a template; those of chat_template_kwargs win over chat's own, as in vLLM."""
    if extra is not None and not isinstance(extra, Mapping):
        raise TypeError(f"chat_template_kwargs is {shown(extra)}, and must be a dict")
    if wrong := sorted(map(str, _OURS & set(extra or ()))):
        raise ValueError(f"chat_template_kwargs holds {', '.join(wrong)}: chat always makes token ids of one conversation")
    if not all(isinstance(key, str) for key in extra or ()):
        raise TypeError(f"chat_template_kwargs is {shown(extra)}, and its keys must be names")
    merged = {**_DEFAULTS, **explicit, **(extra or {})}
    for name in ("add_generation_prompt", "continue_final_message"):
        if not isinstance(merged[name], bool):
            raise TypeError(f"{name} is {shown(merged[name])}, and must be True or False")
    if merged["continue_final_message"] and merged["add_generation_prompt"]:
        raise ValueError("continue_final_message=True continues the last message: set add_generation_prompt=False")
    tools = merged.get("tools")
    if tools is not None and (isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence)):
        raise TypeError(f"tools is {shown(tools)}, and must be a list of them")
    return merged


def render(tokenizer: Any, messages: Sequence[Any], arguments: Mapping[str, Any]) -> str:
    """The text of one conversation. Raises ValueError for messages or a template that make none."""
    given = dict(arguments)
    tools = given.pop("tools", None)
    template = _template(tokenizer, given.pop("chat_template", None), tools)
    plain = [plain_message(message) for message in messages]
    if not plain:
        raise ValueError("the conversation is empty; give at least one message")
    job = {
        **_plain(tokenizer.special_tokens_map, "the tokenizer's special tokens"),
        **{key: _plain(value, f"chat_template_kwargs[{key!r}]") for key, value in given.items()},
        "conversations": [plain],
        "tools": None if tools is None else [_tool(tool) for tool in tools],
        "chat_template": template,
    }
    answer = _worker.ask(pickle.dumps(job))
    if "error" in answer:
        raise TemplateError(f"the chat template cannot render these messages: {shown(Exception(answer['error']), 2000)}")
    return answer["text"]


def _template(tokenizer: Any, wanted: Any, tools: Any) -> str:
    """The text of the template: the one given, in a file or under a name of the tokenizer's, else the tokenizer's own."""
    if wanted is None and not getattr(tokenizer, "chat_template", None):
        raise ValueError("this tokenizer has no chat template; give chat(..., chat_template=TEXT)")
    if isinstance(wanted, os.PathLike) or (isinstance(wanted, str) and "{" not in wanted and len(wanted) < 4096):
        named = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
        path = Path(wanted)
        if wanted not in named:
            if not path.is_file():
                raise ValueError(f"chat_template is {str(wanted)!r}, which is neither a template's text nor a file with one")
            return path.read_text(encoding="utf-8")
    if wanted is not None and not isinstance(wanted, str):
        raise TypeError(f"chat_template is {shown(wanted)}, and must be a template's text, or a file with one")
    return tokenizer.get_chat_template(wanted, tools)


# what a template sees: plain values alone


def plain_message(message: Any) -> dict[str, Any]:
    """A message as templates expect it: the text of its parts joined by newlines, no content as "", tool calls parsed.

    A key that is null counts as absent.
    """
    if callable(getattr(message, "model_dump", None)):  # clients hand back what they got: pydantic objects
        message = message.model_dump()
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"a message is a dict with a 'role' and a 'content'; got {shown(message)}")
    plain = {key: _plain(value, f"a message's {key!r}") for key, value in message.items() if value is not None}
    plain["content"] = _text(plain.get("content", ""))
    if "tool_calls" in plain:
        calls = plain["tool_calls"]
        if not isinstance(calls, list):
            raise ValueError(f"a message's tool_calls is {shown(calls)}, and must be a list")
        plain["tool_calls"] = [_tool_call(call) for call in calls]
    return plain


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list | tuple) else [content]:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            raise ValueError(f"a message's content is text, or parts {{'type': 'text', 'text': ...}}; got {shown(part)}")
    return "\n".join(texts)


def _tool_call(call: Any) -> Any:
    """A tool call whose arguments, which clients send as JSON text, are an object, as templates read them."""
    if not isinstance(call, dict):
        raise ValueError(f"a message's tool_calls holds {shown(call)}, and must hold objects")
    if isinstance(call.get("function"), dict):
        return {**call, "function": _tool_call(call["function"])}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a tool call's arguments are not JSON: {shown(arguments)}: {shown(error)}") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"a tool call's arguments are {shown(arguments)}, and must be a JSON object")
    return {**call, "arguments": parsed}


def _tool(tool: Any) -> Any:
    """A tool's JSON schema: itself, or transformers' of a function's hints and docstring."""
    if callable(tool):
        from transformers.utils import get_json_schema

        tool = get_json_schema(tool)
    if not isinstance(tool, Mapping):
        raise TypeError(f"a tool is a JSON schema, or a function with type hints and a docstring; got {shown(tool)}")
    return _plain(tool, "a tool")


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy of text, numbers, lists and dicts; anything else is no business of a template's. Raises ValueError."""
    if depth > 64:
        raise ValueError(f"{where} is nested too deeply, more than 64 levels")
    if value is None or type(value) in (str, bool, int, float):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {_plain(key, where, depth + 1): _plain(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_plain(item, where, depth + 1) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    raise ValueError(f"{where} holds {shown(value)}, a {type(value).__name__}; a template takes text, numbers, lists and dicts")


# the process beside this one


class _Worker:
    """A process that renders one job after the other, for every thread of this one; a fork starts its own."""

    def __init__(self) -> None:
        self._lock, self._owner = threading.Lock(), os.getpid()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, job: bytes) -> dict[str, Any]:
        """The worker's answer. It is ended, and started anew for the next job, where it takes too long or breaks down."""
        if self._owner != os.getpid():  # a fork: the lock may be held by a thread that is not here, the pipes are the parent's
            self._lock, self._process, self._owner = threading.Lock(), None, os.getpid()
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            try:
                self._send(LENGTH.pack(len(job)) + job)
                return self._receive(SECONDS)
            except TimeoutError:
                self.stop()
                return {"error": f"it ran for more than {SECONDS:g} seconds"}
            except (OSError, EOFError):
                self.stop()
                return {"error": "it ended the process that runs it"}
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        if self._process is None or self._owner != os.getpid():
            return
        process, self._process = self._process, None
        process.kill()
        assert process.stdout is not None and process.stdin is not None
        process.stdout.close()
        with suppress(BrokenPipeError):  # what was not sent is not wanted any more
            process.stdin.close()
        process.wait()

    def _start(self) -> None:
        paths = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, "-P", "-c", "from flexgen.runtime.requests.template_worker import main; main()"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, env={**os.environ, "PYTHONPATH": paths}
        )
        try:
            self._receive(_START_SECONDS)
        except (TimeoutError, OSError, EOFError) as error:
            self.stop()
            raise FlexgenError(f"the process that renders chat templates did not start: {error!r}") from None

    def _send(self, message: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(message)
        self._process.stdin.flush()

    def _receive(self, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        (length,) = LENGTH.unpack(self._read(LENGTH.size, deadline))
        return json.loads(self._read(length, deadline))

    def _read(self, count: int, deadline: float) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        pipe, parts = self._process.stdout.fileno(), []
        while count:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            parts.append(os.read(pipe, min(count, 2**20)))
            if not parts[-1]:
                raise EOFError
            count -= len(parts[-1])
        return b"".join(parts)


_worker = _Worker()
atexit.register(_worker.stop)
