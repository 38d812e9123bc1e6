"""prompt_logprobs: what the model says of the tokens of a prompt. `runner` scores them, the engine reads the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor

from flexgen.runtime.execution.step import DeviceStep
from flexgen.runtime.requests.outputs import token_logprobs
from flexgen.runtime.requests.request import Request
from flexgen.runtime.sampling.sampler import NEVER, Sampled, describe
from flexgen.runtime.scheduling.scheduler import Row
from flexgen.runtime.transfer import Download, upload

_SCORED_ROWS = 256
"""Prompt positions whose logits are held at once."""


@dataclass
class PromptScores:
    """Scores of `request`'s tokens from `position` on."""

    request: Request
    position: int
    values: Download

    def hand_over(self, decode: Callable[[int], str | None]) -> None:
        """Give the request its scores, once they have arrived. What a preemption repeats is known already."""
        known, wanted = self.request.prompt_logprobs, self.request.params.prompt_logprobs
        assert known is not None and wanted is not None
        *columns, top_ids, top_logprobs = self.values.read()
        tops = repeat(((), ())) if top_ids is None else zip(top_ids, top_logprobs or ())
        for position, (chosen, top) in enumerate(zip(zip(*columns), tops), start=self.position):
            if position == len(known):
                known.append(token_logprobs(chosen, top, wanted, decode))


def score_prompts(step: DeviceStep, rows: Sequence[Row], hidden_TD: Tensor) -> list[PromptScores]:
    """Logprobs of the prompt tokens that follow the rows' positions, for requests that asked for them."""
    scores, offset = [], 0
    for row in rows:
        request, first = row.request, offset
        offset += row.count
        if request.params.prompt_logprobs is None:
            continue
        count = min(row.start + row.count, len(request.prompt) - 1) - row.start
        for start in range(0, count, _SCORED_ROWS):
            stop = min(start + _SCORED_ROWS, count)
            position = row.start + start + 1
            following = upload(request.prompt[position : position + stop - start], step.device)
            slots = torch.full_like(following, request.slot)
            logits = step.logits(hidden_TD[first + start : first + stop], slots)
            scored = _score(step, logits.float(), following, request.params.prompt_logprobs)
            scores.append(PromptScores(request, position, scored.download()))
    return scores


def _score(step: DeviceStep, logits_RV: Tensor, following_R: Tensor, top: int) -> Sampled:
    logits_RV[:, step.real_vocab :] = NEVER
    return describe(logits_RV.log_softmax(-1), following_R, step.model.dims.vocab if top == -1 else top)
