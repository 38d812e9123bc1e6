"""How far 16-bit arithmetic moves a model from its fp32 self, and whether ours moves it further than transformers' does.

The error is the mean |difference of log-probability| over the fp32 model's most likely tokens, at teacher-forced positions.
Greedy tokens would say less: two ways to round the same model agree on 91 to 100 % of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flexgen.runtime.loading.model import Model
from flexgen.verify import reference
from flexgen.verify.harness import Harness
from flexgen.verify.modules import Modules

TOP = 20
LIMIT = 1.1
"""Most that our error may be of transformers' own, whose two attentions differ by up to 10 % on tiny MoE models."""

CHOICES = frozenset({"top_k_index", "router_indices"})
"""How transformers' experts call the argument that says which of them a token takes."""


@dataclass(frozen=True)
class Rounding:
    """Errors against the fp32 model, in nats, and the share of (token, router) pairs whose set of experts differs."""

    positions: int
    ours: float
    theirs: float
    our_flips: float
    their_flips: float

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs

    def __str__(self) -> str:
        flips = f", expert flips {self.our_flips:.2%} and {self.their_flips:.2%}" if self.their_flips else ""
        errors = f"ours {self.ours:.2e}, transformers {self.theirs:.2e}, ratio {self.ratio:.3f}"
        return f"{errors} over {self.positions} positions{flips}"


@torch.no_grad()
def rounding(
    model: Model, exact: Any, rounded: Any, sequences: Sequence[Sequence[int]], prefill: int | None = None
) -> Rounding:
    """Compare `model` and transformers' `rounded`, both of 16 bits, with its `exact` in fp32; all hold the same weights.

    `sequences` have equal lengths; every position of each counts. Ours run together: the first `prefill` tokens of each in
    one step (None: all), the others one by one. Transformers' run one after the other, in one pass each.
    """
    true_logits, true_experts = _transformers(exact, model, sequences)
    truth = true_logits.log_softmax(-1).topk(TOP)

    def error(logits_TV: Tensor) -> float:
        logprobs = logits_TV.float().log_softmax(-1).gather(-1, truth.indices)
        return float((logprobs - truth.values).abs().mean())

    def flips(experts_TLK: Tensor) -> float:
        return float((experts_TLK != true_experts).any(-1).float().mean()) if experts_TLK.numel() else 0.0

    our_logits, our_experts = _engine(model, sequences, prefill or len(sequences[0]))
    their_logits, their_experts = _transformers(rounded, model, sequences)
    errors = error(our_logits), error(their_logits)
    return Rounding(len(true_logits), *errors, flips(our_experts), flips(their_experts))


def _engine(model: Model, sequences: Sequence[Sequence[int]], prefill: int) -> tuple[Tensor, Tensor]:
    """Logits (T, V) and sorted experts (T, routers, K), sequence after sequence."""
    rows, length = len(sequences), len(sequences[0])
    harness = Harness(model, rows, length, routed_tokens=rows * prefill)
    logits, experts = [], []
    ends = [prefill, *range(prefill + 1, length + 1)]
    for start, end in pairwise([0, *ends]):
        fed = harness.feed({row: tokens[start:end] for row, tokens in enumerate(sequences)})
        logits.append(torch.stack(list(fed.values())))
        experts.append(harness.routed(rows * (end - start)).unflatten(0, (rows, -1)))
    return torch.cat(logits, dim=1).flatten(0, 1), torch.cat(experts, dim=1).flatten(0, 1)


def _transformers(oracle: Any, model: Model, sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    modules = Modules(model, oracle)
    routers = {}
    for index, names in enumerate(model.routers):
        for name, k in names.items():
            routers[_chooser(modules, index, name)] = k
    logits, experts = [], []
    for tokens in sequences:
        with reference.recorded({name: modules.named[name] for name in routers}) as calls:
            logits.append(reference.logits(oracle, tokens).float())
        chosen = [_choice(calls[name], k, len(tokens)) for name, k in routers.items()]
        experts.append(torch.stack(chosen, 1).sort().values if chosen else torch.empty(len(tokens), 0, 0))
    return torch.cat(logits), torch.cat(experts)


def _chooser(modules: Modules, index: int, role: str) -> str:
    """The module that says which experts a layer takes: the experts where they are given them, else the router."""
    inside = [name for name in modules.named if name.startswith(f"{modules.layers[index]}.")]
    given = [name for name in inside if not CHOICES.isdisjoint(inspect.signature(modules.named[name].forward).parameters)]
    return given[0] if given else modules.by_role[index, role.replace("_routed", "_router")][0]


def _choice(call: reference.Call, k: int, tokens: int) -> Tensor:
    """The experts (T, K) of one call."""
    for name in CHOICES & call.arguments.keys():
        return call.arguments[name].view(tokens, k)
    assert call.first_output is not None
    return call.first_output.view(tokens, -1).topk(k).indices
