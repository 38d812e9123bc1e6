"""Python's garbage collector while an engine runs: a search of all old objects takes as long as many steps.

`LLM.generate` holds it back while it drives one.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

NEVER = 2**31 - 1
"""A threshold that no count reaches."""

_lock = threading.Lock()
_inside = 0
_threshold = 0
"""That of the oldest generation while nobody is inside."""


@contextmanager
def few_collections() -> Iterator[None]:
    """Meanwhile only young objects are searched. Several threads may be inside at once; the last one out ends it."""
    global _inside, _threshold
    with _lock:
        first, second, old = gc.get_threshold()
        if not _inside:
            _threshold = old
            gc.set_threshold(first, second, NEVER)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            first, second, old = gc.get_threshold()
            if not _inside and old == NEVER:  # nobody else has set it since
                gc.set_threshold(first, second, _threshold)
