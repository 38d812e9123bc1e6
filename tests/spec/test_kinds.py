"""What a kind may be: slots that are empty or sum several parts, and kinds that lists of single slots make."""

from __future__ import annotations

import pytest

from flexgen.assets import root
from flexgen.ir.resolve import resolve
from flexgen.render.render import render
from flexgen.spec.diagnostics import SpecError
from flexgen.spec.load import parse_spec

CROSSED = """kinds:
  full: {attention: full}
  sliding: {attention: sliding}
  both: {feed_forward: [moe, mlp]}
  dense: {feed_forward: mlp}
  bare: {feed_forward: none}

schedule:
  attention:
    - {all: true, kind: full}
    - {by: slides, kinds: {0: full, 1: sliding}}
  feed_forward:
    - {all: true, kind: dense}
    - {every: decoder_sparse_step, kind: both}
    - {at: mlp_only_layers, kind: bare}

"""
TINY = "  sliding_window: 8\n  slides: [0, 1, 1, 0]\n  decoder_sparse_step: 2\n  mlp_only_layers: [0]\n"


def spec(kinds: str = CROSSED) -> str:
    text = (root("specs") / "qwen3_moe.yaml").read_text()
    before, after = text[: text.index("kinds:\n")], text[text.index("block:\n") :]
    before = before.replace("    use_sliding_window: false\n", "")
    return before + kinds + after.replace("  mlp_only_layers: [1]\n", TINY)


def walker(text: str) -> str:
    return render(resolve(parse_spec(text, "crossed.yaml")))["walker.py"]


def test_kinds_of_two_slots_cross_and_share_functions():
    code = walker(spec())
    for attention in ("full", "sliding"):
        for block, kind in (("moe_mlp_block", "both"), ("mlp_block", "dense"), ("full_bare_block", "bare")):
            name = f"def {attention}_{kind}_layer("
            assert f"    return {block}(w, x_TD, dims, step, {attention}_attention)" in code[code.index(name) :][:200]
    assert "h_TD = moe_TD + mlp_TD" in code


def test_an_empty_slot_takes_its_branch_and_its_weights_away():
    code = walker(spec())
    bare = code[code.index("def full_bare_block(") :].split("\n\n\n")[0]
    assert "feed_forward" not in bare and "post_attention_layernorm" not in bare and bare.count("x_TD + h_TD") == 1
    assert '"full_bare": (block_weights, full_weights),' in code
    assert '"full_dense": (block_weights, full_both_block_weights, full_weights, mlp_weights),' in code


REFUSED = {
    "nothing": ("{feed_forward: none}\n", "{feed_forward: none, attention: none}\n", "fills 2 slots"),
    "slot without a list": ("  feed_forward:\n", "  feed:\n", "unknown slot `feed`"),
    "kind of another slot": ("{all: true, kind: dense}", "{all: true, kind: full}", "unknown kind `full`"),
    "no kind everywhere": ("    - {all: true, kind: dense}\n", "", "no rule of the schedule of `feed_forward`"),
    "a list of one": ("[moe, mlp]", "[moe]", "needs at least 2 items"),
    "an unknown value": ("1: sliding}", "2: sliding}", "no layer of `tiny` has `2` in `slides`"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    good, bad, message = REFUSED[name]
    assert good in CROSSED
    with pytest.raises(SpecError) as refused:
        walker(spec(CROSSED.replace(good, bad)))
    assert any(message in item.message for item in refused.value.diagnostics), str(refused.value)


def test_a_kind_that_computes_nothing_is_refused():
    text = (root("specs") / "llama.yaml").read_text()
    text = text.replace("  full: {attention: full}", "  full: {attention: full, mlp_slot: mlp}\n  void: {attention: none, mlp_slot: none}")
    text = text.replace("weight: post_attention_layernorm}, mlp]", "weight: post_attention_layernorm}, mlp_slot]")
    with pytest.raises(SpecError, match="layers of kind `void` compute nothing"):
        walker(text)
