"""What is measured: prompts and how they are answered."""

from __future__ import annotations

from dataclasses import dataclass

from flexgen.runtime.requests.params import SamplingParams


@dataclass(frozen=True)
class Workload:
    """`prompt` tokens in and `new` tokens out for each request, without an end of text."""

    name: str
    prompt: int
    new: int
    temperature: float
    logprobs: int | None
    repeats: int

    def prompts(self, batch: int, run: int) -> list[list[int]]:
        """`batch` prompts that differ from each other and from those of every other `run`."""
        return [
            [100 + (37 * row + 11 * place + 101 * run + row // 135) % 5000 for place in range(self.prompt)]
            for row in range(batch)
        ]

    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            seed=None if self.temperature == 0 else 0,
            logprobs=self.logprobs,
            max_tokens=self.new,
            ignore_eos=True,
            detokenize=False,
        )


DECODE = Workload("decode", prompt=12, new=128, temperature=0.0, logprobs=None, repeats=3)
ROLLOUT = Workload("rollout", prompt=256, new=512, temperature=1.0, logprobs=0, repeats=1)
WORKLOADS = {each.name: each for each in (DECODE, ROLLOUT)}
BATCHES = {"decode": (1, 8, 16, 32, 48, 64, 128, 256), "rollout": (256,)}
