"""The process in which chat templates run, so that one can neither hang nor fill the engine's. Started by `templates`.

In: jobs from stdin, each four bytes of length and a pickle of `render_jinja_template`'s arguments. Out: the same way, JSON with
the text or the error. It ends when stdin does.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

MOST_CHARACTERS = 2**25
"""Of one rendered conversation: some million tokens."""

_MOST_BYTES = 2**30
"""Memory that a template may take beyond what the process takes without it."""

LENGTH = struct.Struct("<I")


def receive(stream: BinaryIO) -> bytes | None:
    """One message, None at the end of the stream."""
    head = stream.read(LENGTH.size)
    return stream.read(*LENGTH.unpack(head)) if len(head) == LENGTH.size else None


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get between answers
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit_memory()
    _send(answers, {"ready": True})
    while (job := receive(sys.stdin.buffer)) is not None:
        _send(answers, _render(render_jinja_template, pickle.loads(job)))


def _render(render: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, object]:
    from jinja2 import TemplateError

    try:
        texts, _ = render(**arguments)
        text = texts[0]
        if len(text) > MOST_CHARACTERS:
            return {"error": f"it writes {len(text)} characters, and {MOST_CHARACTERS} is the most"}
        return {"text": text}
    except TemplateError as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": f"it takes more than {_MOST_BYTES >> 20} MiB of memory"}
    except Exception as error:  # whatever a template raises
        return {"error": f"{type(error).__name__}: {error}"}


def _send(answers: BinaryIO, answer: dict[str, object]) -> None:
    message = json.dumps(answer).encode()
    answers.write(LENGTH.pack(len(message)) + message)
    answers.flush()


def _limit_memory() -> None:
    """Where the system can: Linux says how much the process takes now."""
    try:
        import resource

        with open("/proc/self/statm") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):
        return
    resource.setrlimit(resource.RLIMIT_AS, (taken + _MOST_BYTES, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main()
