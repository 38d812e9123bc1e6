"""The catalogue of diagnostics: what `flexgen explain CODE` prints and what the documentation lists.

A code keeps its meaning for good: a new mistake takes the next number, a retired one is never used again.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from enum import IntEnum

_WIDTH = 100


class Stage(IntEnum):
    """When a mistake is found. A later stage's message about the same place is only a consequence."""

    FILE = 1
    SHAPE = 2
    NAME = 3
    MEANING = 4


@dataclass(frozen=True)
class Code:
    """One kind of mistake: what it is, why it is refused, and the smallest example of it, wrong and right."""

    code: str
    stage: Stage
    title: str
    why: str
    bad: str
    good: str

    def explain(self) -> str:
        """The entry as `flexgen explain CODE` prints it."""
        why = textwrap.fill(self.why, _WIDTH)
        bad, good = textwrap.indent(self.bad, "    "), textwrap.indent(self.good, "    ")
        return f"{self.code}: {self.title}\n\n{why}\n\nWrong:\n\n{bad}\n\nRight:\n\n{good}\n"


_ENTRIES = (
    Code(
        "SPEC001",
        Stage.FILE,
        "the file is not valid YAML",
        "A spec is one YAML document. The message points at the first character that does not fit. The usual "
        "causes: text that holds `: ` or starts with one of `@ % & * ! [ {` without quotes, a bracket that is never"
        " closed, a line that is indented differently from its neighbours.",
        "summary: Gemma 4: the dense model",
        'summary: "Gemma 4: the dense model"',
    ),
    Code(
        "SPEC002",
        Stage.FILE,
        "a YAML feature that specs do not use",
        "Anchors, aliases, merge keys, tags, directives, several documents and tabs make a file mean "
        "something else than it seems to, differently in different tools. Entries share fields with `like` "
        "instead.",
        "attention:\n"
        "  full: &full {heads: heads, kv_heads: kv_heads, head_dim: head_dim, rope: rope}\n"
        "  sliding: *full",
        "attention:\n"
        "  full: {heads: heads, kv_heads: kv_heads, head_dim: head_dim, rope: rope, bias: attention_bias,\n"
        "         q_norm: rms, k_norm: rms}\n"
        "  sliding: {like: full, window: window}",
    ),
    Code(
        "SPEC003",
        Stage.FILE,
        "the same key twice",
        "Most YAML tools silently keep the last of two equal keys, so half of what was written would have no effect.",
        "dims:\n  hidden: hidden_size\n  hidden: d_model",
        "dims:\n  hidden: hidden_size",
    ),
    Code(
        "SPEC004",
        Stage.SHAPE,
        "unknown field",
        "The entry has no field of this name, so it would be ignored, and a silently ignored feature is a "
        "wrong model.",
        "attention:\n"
        "  full: {heads: heads, kv_heads: kv_heads, head_dim: head_dim, rope: rope, bias: attention_bias,\n"
        "         windw: 4096}",
        "attention:\n"
        "  full: {heads: heads, kv_heads: kv_heads, head_dim: head_dim, rope: rope, bias: attention_bias,\n"
        "         window: 4096}",
    ),
    Code(
        "SPEC005",
        Stage.SHAPE,
        "missing field",
        "The entry cannot be understood without this field, and no value would be right for every model.",
        "mlp:\n"
        "  mlp: {act: silu, bias: mlp_bias}",
        "mlp:\n"
        "  mlp: {size: size, act: silu, bias: mlp_bias}",
    ),
    Code(
        "SPEC006",
        Stage.SHAPE,
        "wrong type of value",
        "Values are taken as written: a quoted number is text, `no` and `on` are text, and nothing is "
        "converted.",
        "checkpoint:\n"
        "  model_types: llama",
        "checkpoint:\n"
        "  model_types: [llama]",
    ),
    Code(
        "SPEC007",
        Stage.SHAPE,
        "not one of the values that this field takes",
        "The field chooses between forms that the compiler can generate. The message lists them.",
        "norms:\n"
        "  rms: {kind: rmsnorm, cast: before, eps: eps}",
        "norms:\n"
        "  rms: {kind: rms, cast: before, eps: eps}",
    ),
    Code(
        "SPEC008",
        Stage.NAME,
        "a name that is not defined",
        "Norms, ropes, attentions, mlps and moes are defined once, in their own section, and referred to by "
        "name.",
        "block:\n"
        "  - add: [{norm: rsm, weight: input_layernorm}, attention]\n"
        "  - add: [{norm: rms, weight: post_attention_layernorm}, mlp]",
        "block:\n"
        "  - add: [{norm: rms, weight: input_layernorm}, attention]\n"
        "  - add: [{norm: rms, weight: post_attention_layernorm}, mlp]",
    ),
    Code(
        "SPEC009",
        Stage.NAME,
        "`like` that leads nowhere",
        "`like` copies the fields of another entry of the same section. That entry must exist, and following "
        "`like` from it must never come back.",
        "norms:\n"
        "  rms: {like: bare}\n"
        "  bare: {like: rms, gain: none}",
        "norms:\n"
        "  rms: {kind: rms, cast: after, eps: eps}\n"
        "  bare: {like: rms, gain: none}",
    ),
    Code(
        "SPEC010",
        Stage.MEANING,
        "a field that has no effect",
        "No generated line depends on this field. Either it is not needed, or it was meant for another entry. "
        "An inherited field that has no effect is set to `none`.",
        "attention:\n"
        "  full: {heads: heads, kv_heads: kv_heads, head_dim: head_dim, rope: rope, bias: attention_bias,\n"
        "         q_norm_weight: q_layernorm}",
        "attention:\n"
        "  full: {heads: heads, kv_heads: kv_heads, head_dim: head_dim, rope: rope, bias: attention_bias,\n"
        "         q_norm: rms, q_norm_weight: q_layernorm}",
    ),
    Code(
        "SPEC011",
        Stage.SHAPE,
        "an expression that cannot be read",
        "Expressions hold names, numbers, `+ - * / // ( )`, `min`, `max`, `sqrt` and `a or b`. They are at "
        "most 200 characters long and nested at most 32 deep. Nothing else is ever evaluated.",
        "dims:\n"
        "  head_dim: head_dim or hidden % heads",
        "dims:\n"
        "  head_dim: head_dim or hidden // heads",
    ),
    Code(
        "SPEC012",
        Stage.NAME,
        "an expression with an unknown name",
        "Only `dims` reads the checkpoint's config. Expressions elsewhere use the names that `dims` defines.",
        "embedding: {weight: embed_tokens, scale: sqrt(hiden)}",
        "embedding: {weight: embed_tokens, scale: sqrt(hidden)}",
    ),
    Code(
        "SPEC013",
        Stage.NAME,
        "the schedule names an unknown kind",
        "Each kind that the schedule can choose is described in `kinds`.",
        "schedule:\n"
        "  - {all: true, kind: fulll}",
        "schedule:\n"
        "  - {all: true, kind: full}",
    ),
    Code(
        "SPEC014",
        Stage.MEANING,
        "a layer without a kind",
        "The rules of `schedule` together must choose a kind for every layer; later rules win.",
        "schedule:\n"
        "  - {first: 3, kind: full}",
        "schedule:\n"
        "  - {all: true, kind: full}",
    ),
    Code(
        "SPEC015",
        Stage.SHAPE,
        "attention without a rope",
        "Without a rope the model cannot tell positions apart. Where that is meant, the entry says `rope: "
        "none`.",
        "attention:\n"
        "  full: {heads: heads, kv_heads: kv_heads, head_dim: head_dim, bias: attention_bias}",
        "attention:\n"
        "  full: {heads: heads, kv_heads: kv_heads, head_dim: head_dim, rope: rope, bias: attention_bias}",
    ),
    Code(
        "SPEC016",
        Stage.MEANING,
        "query heads that do not divide among key/value heads",
        "Each key/value head serves the same number of query heads, so `heads` is a multiple of `kv_heads`; "
        "and `value_heads` of a gated-delta mixer is one of `key_heads`. Where config.json gives the numbers, "
        "loading refuses a file in which they do not divide.",
        "attention:\n"
        "  sliding: {like: full, heads: 6, kv_heads: 4, window: window}",
        "attention:\n"
        "  sliding: {like: full, heads: 8, kv_heads: 4, window: window}",
    ),
    Code(
        "SPEC017",
        Stage.MEANING,
        "a branch that changes the shape",
        "What `add` adds to the stream, and what `sum` sums, must have one and the same width.",
        "block:\n"
        "  - add: [{norm: rms, weight: input_layernorm}, attention]\n"
        "  - add: [{norm: rms, weight: post_attention_layernorm}, mlp, {linear: mlp.widen, size: size}]",
        "block:\n"
        "  - add: [{norm: rms, weight: input_layernorm}, attention]\n"
        "  - add: [{norm: rms, weight: post_attention_layernorm}, mlp, {linear: mlp.widen, size: size},\n"
        "          {linear: mlp.narrow, size: hidden}]",
    ),
    Code(
        "SPEC018",
        Stage.MEANING,
        "a weight that no step uses",
        "A tensor that is loaded and never used is memory lost, or a step forgotten. What the checkpoint "
        "holds but the model does not use is listed in `checkpoint.skip`.",
        "head: {norm: {norm: bare, weight: norm}, weight: lm_head, tied: tied, softcap: softcap}",
        "head: {norm: {norm: rms, weight: norm}, weight: lm_head, tied: tied, softcap: softcap}",
    ),
    Code(
        "SPEC019",
        Stage.MEANING,
        "a step without its weight",
        "The step multiplies by a learned weight, so it must name the module or tensor that holds it.",
        "head: {norm: {norm: rms}, weight: lm_head, tied: tied}",
        "head: {norm: {norm: rms, weight: norm}, weight: lm_head, tied: tied}",
    ),
    Code(
        "SPEC020",
        Stage.SHAPE,
        "a name that cannot be used",
        "Names of entries become names in generated Python, and the spec's own name becomes a folder: small "
        "letters, digits and `_`, a letter first, at most 40 characters, and no word that Python or the "
        "generated code already uses.",
        "name: class",
        "name: llama_3",
    ),
    Code(
        "SPEC021",
        Stage.SHAPE,
        "a bad tensor name",
        "Tensor and module names are letters, digits and `_` joined by dots; `*` stands for an index where a "
        "name is a pattern. Quotes, braces, blanks and slashes are refused, and `.weight` and `.bias` of a "
        "module are implied.",
        "block:\n"
        "  - add: [{norm: rms, weight: input_layernorm}, attention]\n"
        "  - add: [{norm: rms, weight: post_attention_layernorm}, mlp]\n"
        "  - gain: layers.{i}.scalar",
        "block:\n"
        "  - add: [{norm: rms, weight: input_layernorm}, attention]\n"
        "  - add: [{norm: rms, weight: post_attention_layernorm}, mlp]\n"
        "  - gain: layer_scalar",
    ),
    Code(
        "SPEC022",
        Stage.MEANING,
        "a bad expert layout",
        "A layout says how one file holds the experts: `stacked` with its `axes` (each of expert, out and in "
        "once) and `order`, or `per_expert` with one name a part. The layouts of a list must differ, so that "
        "exactly one can match.",
        "moe:\n"
        "  moe:\n"
        "    down: [{stacked: experts.down_proj, axes: [out, expert, in]}]",
        "moe:\n"
        "  moe:\n"
        "    down: [{stacked: experts.down_proj, axes: [expert, out, in]}]",
    ),
    Code(
        "SPEC023",
        Stage.MEANING,
        "`require` or `defaults` that cannot hold",
        "`require` fences the spec: a field with a value, a list of values or `{min: n}`; `defaults` is what "
        "the family's config class fills in. A required field that neither `defaults` nor `tiny` has may be a "
        "slip of the pen, a default of the wrong type would fail at load, and a field cannot be both required "
        "and ignored.",
        "checkpoint:\n"
        "  require: {hidden_act: silu, tie_embeddings: false}",
        "checkpoint:\n"
        "  require: {hidden_act: silu, tie_word_embeddings: false}",
    ),
    Code(
        "SPEC024",
        Stage.MEANING,
        "a `tiny` config that does not fit its spec",
        "`tiny` is the smallest config that shows every feature: the spec itself must accept it, every field "
        "in it must be read and fit its type, and every kind must occur, as `tiny` is or with one flag of the "
        "schedule turned.",
        "tiny:\n"
        "  num_hidden_layers: 0",
        "tiny:\n"
        "  num_hidden_layers: 2",
    ),
    Code(
        "SPEC025",
        Stage.MEANING,
        "part of the language that is not implemented",
        "The language has a place for this, but no code is generated for it yet. It is refused so that it is "
        "never ignored.",
        "norms:\n"
        "  rms: {kind: rms, gain: one_plus, cast: before, eps: eps}",
        "norms:\n"
        "  rms: {kind: rms, gain: one_plus, cast: after, eps: eps}",
    ),
    Code(
        "SPEC026",
        Stage.FILE,
        "a comma ended the text",
        "Between braces a comma starts the next key, so text that holds one must be quoted. A key between "
        "braces without a value is nearly always the rest of such a text; where nothing is meant, write "
        "`none` or `null`.",
        "norms:\n"
        "  rms: {kind: rms, cast: before, eps: eps, why: the mean, not the variance}",
        "norms:\n"
        '  rms: {kind: rms, cast: before, eps: eps, why: "the mean, not the variance"}',
    ),
    Code(
        "SPEC027",
        Stage.FILE,
        "a number that cannot be used",
        "Numbers are finite: integers of at most 64 bits with their sign, and floats within double precision.",
        "checkpoint:\n"
        "  defaults:\n"
        "    rms_norm_eps: .inf",
        "checkpoint:\n"
        "  defaults:\n"
        "    rms_norm_eps: 1e-6",
    ),
    Code(
        "SPEC028",
        Stage.FILE,
        "not a spec file",
        "A spec is UTF-8 text of at most 1 MiB, nested at most 64 deep, whose top level is a mapping of "
        "field: value.",
        "- norms\n"
        "- ropes",
        "norms:\n"
        "  rms: {kind: rms, cast: before, eps: eps}",
    ),
    Code(
        "SPEC029",
        Stage.MEANING,
        "an expression of the wrong type",
        "Sizes are integers, so they divide with `//`; `/` and `sqrt` give a float. Lists have no arithmetic, "
        "and `//` none for floats.",
        "dims:\n"
        "  size: 2 * intermediate_size / 3",
        "dims:\n"
        "  size: 2 * intermediate_size // 3",
    ),

)

CODES: dict[str, Code] = {entry.code: entry for entry in _ENTRIES}
"""Every diagnostic by its code."""
