"""The digest of a spec stands for what it says, not for how it is written."""

from __future__ import annotations

from flexgen.assets import root
from flexgen.spec.load import parse_spec

TEXT = (root("specs") / "qwen3.yaml").read_text()
DIGEST = parse_spec(TEXT, "spec.yaml").digest


def digest(old: str, new: str) -> str:
    assert old in TEXT
    return parse_spec(TEXT.replace(old, new, 1), "spec.yaml").digest


def test_comments_key_order_and_like_do_not_change_it():
    assert digest("norms:", "# about norms\nnorms:") == DIGEST
    assert digest("{kind: rms, cast: before, eps: eps}", "{eps: eps, cast: before, kind: rms}") == DIGEST
    written_out = (
        "{heads: heads, kv_heads: kv_heads, head_dim: head_dim, rope: rope, bias: attention_bias, q_norm: rms, k_norm: rms,\n"
        "     window: window}"
    )
    assert digest("{like: full, window: window}", written_out) == DIGEST
    assert parse_spec(TEXT.replace("\n", "\r\n").encode(), "spec.yaml").digest == DIGEST


def test_whatever_it_says_changes_it():
    assert digest("cast: before", "cast: after") != DIGEST
    assert digest("hidden_size: 64", "hidden_size: 128") != DIGEST
    assert digest("full: {attention: full}", "whole: {attention: full}") != DIGEST
