"""Structured output: answers that belong to a JSON schema, a regular expression, a list of choices or a grammar.

xgrammar (the extra `structured`) compiles the language and says, token by token, what may follow.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexgen.errors import FlexgenError
from flexgen.runtime.requests.params import StructuredOutputsParams

if TYPE_CHECKING:
    from flexgen.runtime.requests.tokens import Tokens


class Grammar:
    """Where one answer stands in its language."""

    def __init__(self, xgrammar: Any, compiled: Any, vocab: int, has_eos: bool) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=not has_eos)
        self._bits = xgrammar.allocate_token_bitmask(1, vocab)
        self._shifts = torch.arange(32, dtype=torch.int32)

    def mask(self, logits_V: Tensor) -> Tensor:
        """`logits_V` with every token that may not come next at -inf."""
        self._matcher.fill_next_token_bitmask(self._bits)
        allowed = (self._bits[0, :, None] >> self._shifts & 1).flatten().bool().to(logits_V.device)
        refused = torch.ones_like(logits_V, dtype=torch.bool)
        count = min(len(allowed), len(logits_V))
        refused[:count] = ~allowed[:count]
        return logits_V.masked_fill(refused, float("-inf"))

    def accept(self, token: int) -> bool:
        """Go on by a token; False where the language has none such here."""
        return self._matcher.is_terminated() or self._matcher.accept_token(token)

    @property
    def complete(self) -> bool:
        return self._matcher.is_terminated()


class GrammarCompiler:
    """Compiles structured_outputs for one tokenizer, once for each distinct language."""

    def __init__(self, tokens: Tokens) -> None:
        try:
            import xgrammar
        except ImportError as error:
            raise FlexgenError(
                "structured_outputs needs the package xgrammar: pip install 'flexgen[structured]'"
            ) from error
        self._xgrammar, self._vocab, self._has_eos = xgrammar, tokens.vocab, bool(tokens.eos_ids)
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokens.require("structured_outputs"), vocab_size=tokens.vocab, stop_token_ids=list(tokens.eos_ids)
        )
        self._compiler = xgrammar.GrammarCompiler(info)
        self._compile_cached = lru_cache(maxsize=256)(self._compile)

    def start(self, params: StructuredOutputsParams) -> Grammar:
        """A grammar at its beginning. Raises ValueError if the schema, expression or grammar is not well formed."""
        kind, source = _source(params)
        try:
            compiled = self._compile_cached(kind, source, params.disable_any_whitespace)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"structured_outputs.{kind} is not valid: {error}") from error
        return Grammar(self._xgrammar, compiled, self._vocab, self._has_eos)

    def _compile(self, kind: str, source: str, compact: bool) -> Any:
        if kind == "json":
            return self._compiler.compile_json_schema(source, any_whitespace=not compact)
        if kind == "json_object":
            return self._compiler.compile_json_schema('{"type": "object"}')
        if kind == "regex":
            return self._compiler.compile_regex(source)
        return self._compiler.compile_grammar(source)


def _source(params: StructuredOutputsParams) -> tuple[str, str]:
    """(kind, text) of the one field that is given."""
    if params.json is not None:
        given: Any = params.json
        schema = given.model_json_schema() if hasattr(given, "model_json_schema") else given
        return "json", schema if isinstance(schema, str) else json.dumps(dict(schema))
    if params.regex is not None:
        return "regex", params.regex
    if params.choice is not None:
        return "choice", "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in params.choice)
    if params.grammar is not None:
        return "grammar", params.grammar
    return "json_object", ""
