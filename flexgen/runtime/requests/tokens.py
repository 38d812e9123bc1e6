"""The tokenizer side of a checkpoint: text to ids and back, end-of-sequence ids, chat templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from flexgen.contract.json_files import read_object, shown
from flexgen.errors import ConfigError, FlexgenError
from flexgen.runtime.requests.templates import render

_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json"
)  # fmt: skip
"""One of which every tokenizer that transformers reads has."""

_WITHOUT = "\ngive LLM(tokenizer=DIR), or skip_tokenizer_init=True to work with token ids only"


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
        file = directory / "generation_config.json" if directory else None
        generation = read_object(file) if file is not None and file.exists() else {}
        if tokenizer is None:
            return cls(None, config, generation, vocab)
        _check_directory(tokenizer, vocab)
        from transformers import AutoTokenizer  # a second of import that engines without a tokenizer do not pay

        try:
            loaded = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
        except Exception as error:  # a damaged tokenizer.json raises a bare Exception
            raise FlexgenError(
                f"no tokenizer could be read from {tokenizer}: {shown(error, 1000)}{_WITHOUT}"
            ) from error
        _check_made_up(loaded, tokenizer)
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
        run: list[int] = []
        text, previous_added = "", False
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

    def chat(self, messages: Sequence[Any], **template: Any) -> list[int]:
        """Token ids of a conversation. The template writes BOS where the model wants one; none is added to it."""
        tokenizer = self.require("chat")
        return list(tokenizer(render(tokenizer, messages, template), add_special_tokens=False)["input_ids"])


def _check_directory(tokenizer: str | Path, vocab: int) -> None:
    """Raises FlexgenError for a directory that holds no tokenizer: transformers makes up one of a single token there."""
    directory = Path(tokenizer)
    if not directory.is_dir():
        raise FlexgenError(f"tokenizer is {shown(str(tokenizer))}, which is no directory; nothing is downloaded{_WITHOUT}")
    if not any((directory / name).is_file() for name in _FILES):
        raise FlexgenError(f"no tokenizer could be read from {tokenizer}: it has none of the files {', '.join(_FILES)}{_WITHOUT}")
    file, most = directory / "tokenizer.json", 2**24 + 400 * vocab
    if file.is_file() and (size := file.stat().st_size) > most:
        raise FlexgenError(f"{file} has {size} bytes, and a model of {vocab} tokens has at most {most}: it is damaged{_WITHOUT}")


def _check_made_up(tokenizer: Any, source: str | Path) -> None:
    if not set(tokenizer.get_vocab()) - set(tokenizer.get_added_vocab()):
        raise FlexgenError(
            f"no tokenizer could be read from {source}: what transformers makes of its files has special tokens alone; one of "
            f"{', '.join(_FILES)} is missing or empty{_WITHOUT}"
        )


def _ids(value: int | Sequence[int] | None) -> Sequence[int]:
    ids = () if value is None else value if isinstance(value, list | tuple) else (value,)
    if not all(type(token) is int for token in ids):
        raise ConfigError(f"eos_token_id is {shown(value)}, and must be a token id or a list of them")
    return ids


def _largest_id(tokenizer: Any) -> int:
    return max(tokenizer.get_vocab().values())
