"""Whether an engine can serve what it is asked, and the requests that it makes of it.

The engine asks before a request holds anything: every refusal is a ValueError with the numbers, and leaves nothing behind.
"""

from __future__ import annotations

import operator
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np

from flexgen.contract.json_files import shown
from flexgen.runtime.options import EngineOptions
from flexgen.runtime.requests.params import SamplingParams
from flexgen.runtime.requests.request import Request, RequestGroup
from flexgen.runtime.requests.rules import HostRules, bad_word_ids
from flexgen.runtime.requests.stops import Detokenizer, StopRules
from flexgen.runtime.requests.structured import GrammarCompiler
from flexgen.runtime.requests.tokens import Tokens


@dataclass
class Admission:
    """What one engine can serve.

    vocab        ids that the model has; the tokenizer may have fewer
    has_routers  whether the model sends tokens to experts, and `recorded`, (routers, experts of each) if steps record them
    check_pages  (prompt tokens, new tokens, most tokens of a step): raises where no empty pool could hold them
    """

    tokens: Tokens
    options: EngineOptions
    vocab: int
    has_routers: bool
    recorded: tuple[int, int] | None
    check_pages: Callable[[int, int, int], None]
    _arrivals: int = 0
    _grammars: GrammarCompiler | None = None
    _seeds: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._seeds = random.Random(self.options.seed)

    def admit(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        prompt: str | None,
        timeout: float | None,
        priority: int = 0,
    ) -> RequestGroup:
        """The n requests for one prompt, not queued yet. `params` are as `check_params` returned them."""
        ids = self._check_prompt(prompt_ids)
        room = self.options.max_model_len - len(ids)
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        self.check_pages(len(ids), limit, self.options.max_num_batched_tokens)
        deadline = _deadline(timeout)
        base = self._seeds.getrandbits(63) if params.seed in (None, -1) else int(params.seed)
        requests = [self._request(ids, params, base + child, limit, deadline) for child in range(params.n)]
        for request in requests:
            request.priority = priority
        return RequestGroup(request_id, prompt, ids, params, requests)

    def check_priorities(self, priorities: Sequence[int] | None, prompts: int) -> list[int]:
        """The priority of each of so many prompts. Raises ValueError."""
        if priorities is None:
            return [0] * prompts
        given = list(priorities)
        if len(given) != prompts or not all(type(each) is int for each in given):
            raise ValueError(f"priority is {shown(priorities)}, and must be {prompts} ints, one for each prompt")
        if any(given) and self.options.scheduling_policy != "priority":
            raise ValueError("priority has an effect with LLM(scheduling_policy='priority') only")
        return given

    def check_params(self, params: SamplingParams) -> SamplingParams:
        """A copy that stays as it is. Raises ValueError for what this engine cannot do."""
        params = params.clone()
        params.validate()
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token in getattr(params, name) or ():
                if token >= self.vocab:
                    raise ValueError(f"{name} holds {token}, and this model has ids from 0 to {self.vocab - 1}")
                if token >= self.tokens.vocab and name != "allowed_token_ids":
                    tokens = f"the tokenizer has {self.tokens.vocab} ids"
                    raise ValueError(f"{name} holds {token}, which is padding ({tokens}) and never drawn")
        if params.allowed_token_ids is not None and min(params.allowed_token_ids) >= self.tokens.vocab:
            raise ValueError(f"allowed_token_ids allows only padding ids (the tokenizer has {self.tokens.vocab})")
        for name in ("logprobs", "prompt_logprobs"):
            wanted, most = getattr(params, name) or 0, self.options.max_logprobs
            if wanted > self.vocab:
                raise ValueError(f"{name}={wanted} is more than the vocabulary of {self.vocab}")
            if most not in (None, -1) and not 0 <= wanted <= most:
                raise ValueError(f"{name}={wanted} is more than max_logprobs={most} of this engine")
        if params.return_routed_experts and self.recorded is None:
            known = "give LLM(enable_return_routed_experts=True), which has every step record them"
            raise ValueError(
                f"return_routed_experts=True: {known if self.has_routers else 'this model has no routed experts'}"
            )
        if params.stop_strings:
            self.tokens.require("stop")
        if params.bad_words:
            self.tokens.require("bad_words")
        return params

    def _check_prompt(self, prompt_ids: Sequence[int]) -> list[int]:
        ids = list(prompt_ids)
        if set(map(type, ids)) - {int}:
            ids = [_whole(token) for token in ids]
        if not ids:
            raise ValueError("the prompt is empty (0 tokens); it must have at least 1")
        if min(ids) < 0 or max(ids) >= self.vocab:
            outside = next(token for token in ids if not 0 <= token < self.vocab)
            raise ValueError(f"prompt token {outside} is out of range: this model has ids from 0 to {self.vocab - 1}")
        longest = self.options.max_model_len
        if len(ids) >= longest:
            raise ValueError(
                f"the prompt has {len(ids)} tokens and max_model_len is {longest}: at most {longest - 1} prompt tokens "
                "leave room for one more; shorten the prompt or raise max_model_len"
            )
        return ids

    def _request(
        self, ids: list[int], params: SamplingParams, seed: int, max_tokens: int, deadline: float | None
    ) -> Request:
        extra = frozenset(params.stop_token_ids or ())
        phrases = bad_word_ids(params.bad_words or (), lambda text: self.tokens.encode(text, special=False))
        self._arrivals += 1
        request = Request(
            index=self._arrivals,
            prompt=ids,
            params=params,
            seed=(seed + 2**63) % 2**64 - 2**63,
            stops=self._stops(params, extra, max_tokens),
            stop_ids=tuple(extra.union(self.tokens.eos_ids)),
            banned_tokens=tuple(phrase[0] for phrase in phrases if len(phrase) == 1),
            rules=self._host_rules(params, [phrase for phrase in phrases if len(phrase) > 1]),
            detokenizer=self._detokenizer(ids, params),
            deadline=deadline,
        )
        if self._returns_routes(params) and self.recorded is not None:
            request.routes = np.empty((request.most_tokens - 1, *self.recorded), dtype=np.int16)
        return request

    def _stops(self, params: SamplingParams, extra: frozenset[int], max_tokens: int) -> StopRules:
        eos = () if params.ignore_eos else self.tokens.eos_ids
        first, others = (eos[0] if eos else None), frozenset(eos[1:])
        include = params.include_stop_str_in_output
        return StopRules(first, extra | others, params.stop_strings, include, params.min_tokens, max_tokens)

    def _host_rules(self, params: SamplingParams, phrases: list[tuple[int, ...]]) -> HostRules | None:
        grammar = None
        if params.structured_outputs is not None:
            self._grammars = self._grammars or GrammarCompiler(self.tokens)
            grammar = self._grammars.start(params.structured_outputs)
        processors = params.logits_processors or ()
        if not (grammar or phrases or processors):
            return None
        allowed = params.allowed_token_ids
        ends = [token for token in self.tokens.eos_ids if allowed is None or token in allowed]
        return HostRules(grammar, phrases, processors, ends)

    def _detokenizer(self, ids: list[int], params: SamplingParams) -> Detokenizer | None:
        if not params.detokenize or self.tokens.tokenizer is None:
            return None
        if not params.skip_special_tokens and not params.spaces_between_special_tokens:
            return Detokenizer(self.tokens.decode_spaceless, ids)
        return Detokenizer(lambda part: self.tokens.decode(part, params.skip_special_tokens), ids)

    def _returns_routes(self, params: SamplingParams) -> bool:
        asked = params.return_routed_experts
        return self.options.enable_return_routed_experts if asked is None else asked


def _deadline(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, Real) or not timeout > 0:
        raise ValueError(f"timeout={timeout!r} is out of range: it must be more than 0 seconds, or None")
    return time.monotonic() + timeout


def _whole(token: Any) -> int:
    """A token id as it was given, if it is one."""
    try:
        if isinstance(token, bool):
            raise TypeError
        return operator.index(token)
    except TypeError:
        raise ValueError(f"prompt token {token!r} is a {type(token).__name__}, and must be a whole number") from None
