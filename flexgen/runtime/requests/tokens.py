"""The tokenizer side of a checkpoint: text to ids and back, end-of-sequence ids, chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from flexgen.errors import ConfigError, FlexgenError


class Tokens:
    """A tokenizer (or none, with `skip_tokenizer_init`) and the ids that end a text.

    eos_ids   every end-of-sequence id of tokenizer, generation_config and config; the first is the primary one
    vocab     ids from here on have no token (padding rows of the embedding) and are never sampled
    """

    def __init__(self, tokenizer: Any | None, config: Mapping[str, Any], generation: Mapping[str, Any], vocab: int) -> None:
        self.tokenizer = tokenizer
        own = None if tokenizer is None else tokenizer.eos_token_id
        sources = (own, generation.get("eos_token_id"), config.get("eos_token_id"))
        self.eos_ids = tuple(dict.fromkeys(token for source in sources for token in _ids(source) if token < vocab))
        self.vocab = vocab if tokenizer is None else min(vocab, _largest_id(tokenizer) + 1)
        self.decode_token = lru_cache(maxsize=None)(self._decode_token)

    @classmethod
    def load(cls, tokenizer: str | Path | None, directory: Path | None, config: Mapping[str, Any], vocab: int) -> Tokens:
        """Read the tokenizer at `tokenizer` (None: none) and `directory`'s generation_config.json, if there is one."""
        generation = _read_json(directory / "generation_config.json") if directory else {}
        if tokenizer is None:
            return cls(None, config, generation, vocab)
        from transformers import AutoTokenizer  # a second of import that engines without a tokenizer do not pay

        try:
            loaded = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
        except Exception as error:  # a damaged tokenizer.json raises a bare Exception
            raise FlexgenError(
                f"no tokenizer could be read from {tokenizer}: {error}\n"
                "give LLM(tokenizer=DIR), or skip_tokenizer_init=True to work with token ids only"
            ) from error
        return cls(loaded, config, generation, vocab)

    def require(self, purpose: str) -> Any:
        """The tokenizer; raises where there is none, saying what needs it."""
        if self.tokenizer is None:
            raise ValueError(f"{purpose} needs a tokenizer, and this engine has none (skip_tokenizer_init=True)")
        return self.tokenizer

    def encode(self, text: str, special: bool = True) -> list[int]:
        return self.require("a prompt given as text").encode(text, add_special_tokens=special)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return self.require("text").decode(
            list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )

    def decode_spaceless(self, ids: Sequence[int]) -> str:
        """Decode with specials, and no space between two added tokens that follow each other."""
        added = self.require("text").added_tokens_decoder
        text, run, previous_added = "", [], False
        for token in ids:
            is_added = token in added
            if is_added and previous_added:
                text, run = text + (self.decode(run, skip_special=False) if run else "") + added[token].content, []
            else:
                run.append(token)
            previous_added = is_added
        return text + (self.decode(run, skip_special=False) if run else "")

    def _decode_token(self, token: int) -> str | None:
        return None if self.tokenizer is None else self.decode([token], skip_special=False)

    def chat(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> list[int]:
        """Token ids of a conversation. The template writes BOS where the model wants one; none is added to it."""
        tokenizer = self.require("chat")
        if not getattr(tokenizer, "chat_template", None) and not template.get("chat_template"):
            raise ValueError("this tokenizer has no chat template; give chat(..., chat_template=TEXT)")
        from jinja2 import TemplateError  # as transformers imports it, only where a template is rendered

        plain = [_plain_message(message) for message in messages]
        try:
            return list(tokenizer.apply_chat_template(plain, tokenize=True, return_dict=False, **template))
        except TemplateError as error:
            raise ValueError(f"the chat template cannot render these messages: {error}") from error


def _plain_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose content is text: its parts of type `text` are joined by newlines, as vLLM does."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"a message is a dict with a 'role' and a 'content'; got {message!r}")
    content = message.get("content")
    if content is None or isinstance(content, str):  # None: a message that calls tools
        return message
    texts = []
    for part in content if isinstance(content, Sequence) else [content]:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            raise ValueError(f"a message's content is text, or parts {{'type': 'text', 'text': ...}}; got {part!r}")
    return {**message, "content": "\n".join(texts)}


def _ids(value: int | Sequence[int] | None) -> Sequence[int]:
    ids = () if value is None else value if isinstance(value, list | tuple) else (value,)
    if not all(type(token) is int for token in ids):
        raise ConfigError(f"eos_token_id is {value!r}, and must be a token id or a list of them")
    return ids


def _largest_id(tokenizer: Any) -> int:
    return max(tokenizer.get_vocab().values())


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} holds a {type(fields).__name__}, not an object")
    return fields
