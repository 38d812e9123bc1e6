"""Counters of one engine since it started. Scheduler and engine count, `LLM.metrics` shows them."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Metrics:
    """Plain sums. A step that holds any prompt tokens is a prefill step, every other one a decode step."""

    prefill_steps: int = 0
    prefill_tokens: int = 0
    decode_steps: int = 0
    generated_tokens: int = 0
    dropped_tokens: int = 0
    preemptions: int = 0
    prefix_cache_hit_tokens: int = 0
    lock_step_steps: int = 0
    finished_requests: int = 0
    aborted_requests: int = 0
    step_seconds: float = 0.0

    def as_dict(self) -> dict[str, int | float]:
        return asdict(self)
