"""What a caller gives as prompts and parameters, in any of its forms, as lists. `LLM` and `AsyncEngine` read it here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, NotRequired, TypedDict

from flexgen.contract.json_files import shown
from flexgen.runtime.requests.params import SamplingParams
from flexgen.runtime.requests.tokens import Tokens


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids; `prompt`, if given, is its text, for the output."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]


Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""

Params = SamplingParams | Sequence[SamplingParams]
"""One for all prompts, or one each."""


def parse_prompt(prompt: Prompt, tokens: Tokens) -> tuple[str | None, Sequence[int]]:
    """(text or None, token ids) of a prompt in any of its forms."""
    if isinstance(prompt, str):
        return prompt, tokens.encode(prompt)
    if isinstance(prompt, Mapping):
        known = {"prompt", "prompt_token_ids"}
        if extra := [key for key in prompt if key not in known and prompt[key] is not None]:
            raise NotImplementedError(f"a prompt's {', '.join(map(repr, extra))} is not supported")
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if text is None and ids is None:
            raise ValueError(f"a prompt given as a dict needs 'prompt' or 'prompt_token_ids', got {sorted(prompt)}")
        if text is not None and not isinstance(text, str):
            raise _no_prompt(text)
        return text, tokens.encode(str(text)) if ids is None else _id_list(ids)
    return None, _id_list(prompt)


def _id_list(ids: Any) -> Sequence[int]:
    """Token ids of a prompt given as a list or an array."""
    ids = ids.tolist() if callable(getattr(ids, "tolist", None)) else ids
    if isinstance(ids, str | bytes | bytearray | Mapping) or not isinstance(ids, Iterable):
        raise _no_prompt(ids)
    return list(ids)


def _no_prompt(given: Any) -> TypeError:
    return TypeError(f"a prompt is text, a list of token ids, or a dict with one of them; got {shown(given)}")


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts of a call that may have been given one alone."""
    given: Any = prompts
    given = given.tolist() if callable(getattr(given, "tolist", None)) else given
    if isinstance(given, str | Mapping):
        return [given]
    if isinstance(given, bytes | bytearray) or not isinstance(given, Iterable):
        raise _no_prompt(given)
    listed: list[Any] = list(given)
    return [listed] if listed and all(isinstance(token, Integral) for token in listed) else listed


def params_list(
    params: Params | None, count: int, check: Callable[[SamplingParams], SamplingParams]
) -> list[SamplingParams]:
    """The parameters of each of `count` prompts, each as `check` returns it."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [check(params)] * count
    if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
        raise TypeError(f"sampling_params is one SamplingParams, or a list with one for each prompt; got {params!r}")
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling_params were given for {count} prompts; give one, or one each")
    return list(map(check, params))
