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
        "Anchors, aliases, merge keys, tags, directives, several documents and tabs make a file mean something else"
        " than it seems to, differently in different tools. Entries share fields with `like` instead.",
        "norms:\n  pre: &base {kind: rms}\n  post: *base",
        "norms:\n  pre: {kind: rms}\n  post: {like: pre}",
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
        "The entry has no field of this name, so it would be ignored, and a silently ignored feature is a wrong model.",
        "attention:\n  full: {heads: heads, kv_heads: kv_heads, head_dim: head_dim, rope: main, windw: window}",
        "attention:\n  full: {heads: heads, kv_heads: kv_heads, head_dim: head_dim, rope: main, window: window}",
    ),
    Code(
        "SPEC005",
        Stage.SHAPE,
        "missing field",
        "The entry cannot be understood without this field, and no value would be right for every model.",
        "mlp:\n  dense: {act: silu}",
        "mlp:\n  dense: {size: size, act: silu}",
    ),
    Code(
        "SPEC006",
        Stage.SHAPE,
        "wrong type of value",
        "Values are taken as written: a quoted number is text, `no` and `on` are text, and nothing is converted.",
        'moe:\n  experts: {experts: experts, top_k: ["2"]}',
        "moe:\n  experts: {experts: experts, top_k: 2}",
    ),
    Code(
        "SPEC007",
        Stage.SHAPE,
        "not one of the values that this field takes",
        "The field chooses between forms that the compiler can generate. The message lists them.",
        "norms:\n  pre: {kind: rmsnorm, eps: eps}",
        "norms:\n  pre: {kind: rms, eps: eps}",
    ),
    Code(
        "SPEC008",
        Stage.NAME,
        "a name that is not defined",
        "Norms, ropes, attentions, mlps and moes are defined once, in their own section, and referred to by name.",
        "norms:\n  rms: {kind: rms, eps: eps}\nblock:\n  - add: [{norm: rsm, weight: input_layernorm}, attention]",
        "norms:\n  rms: {kind: rms, eps: eps}\nblock:\n  - add: [{norm: rms, weight: input_layernorm}, attention]",
    ),
    Code(
        "SPEC009",
        Stage.NAME,
        "`like` that leads nowhere",
        "`like` copies the fields of another entry of the same section. That entry must exist, and following `like`"
        " from it must never come back.",
        "norms:\n  a: {like: b}\n  b: {like: a}",
        "norms:\n  a: {kind: rms, eps: eps}\n  b: {like: a}",
    ),
    Code(
        "SPEC010",
        Stage.MEANING,
        "a field that has no effect",
        "No generated line depends on this field. Either it is not needed, or it was meant for another entry. An "
        "inherited field that has no effect is set to `none`.",
        "attention:\n  full: {heads: heads, kv_heads: kv_heads, head_dim: head_dim, rope: none, rope_layout: pair}",
        "attention:\n  full: {heads: heads, kv_heads: kv_heads, head_dim: head_dim, rope: none}",
    ),
    Code(
        "SPEC011",
        Stage.SHAPE,
        "an expression that cannot be read",
        "Expressions hold names, numbers, `+ - * / // ( )`, `min`, `max`, `sqrt` and `a or b`. They are at most 200"
        " characters long and nested at most 32 deep. Nothing else is ever evaluated.",
        "dims:\n  head_dim: hidden_size % num_attention_heads",
        "dims:\n  head_dim: hidden_size // num_attention_heads",
    ),
    Code(
        "SPEC012",
        Stage.NAME,
        "an expression with an unknown name",
        "Only `dims` reads the checkpoint's config. Expressions elsewhere use the names that `dims` defines.",
        "dims:\n  hidden: hidden_size\nembedding: {weight: embed_tokens, scale: sqrt(hiden)}",
        "dims:\n  hidden: hidden_size\nembedding: {weight: embed_tokens, scale: sqrt(hidden)}",
    ),
    Code(
        "SPEC013",
        Stage.NAME,
        "the schedule names an unknown kind",
        "Each kind that the schedule can choose is described in `kinds`.",
        "kinds:\n  full: {attention: full}\nschedule:\n  - {all: fill}",
        "kinds:\n  full: {attention: full}\nschedule:\n  - {all: full}",
    ),
    Code(
        "SPEC014",
        Stage.MEANING,
        "a layer without a kind",
        "The rules of `schedule` together must choose a kind for every layer; later rules win.",
        "schedule:\n  - {first: 3, kind: dense}",
        "schedule:\n  - {all: sparse}\n  - {first: 3, kind: dense}",
    ),
    Code(
        "SPEC015",
        Stage.MEANING,
        "attention without a rope",
        "Without a rope the model cannot tell positions apart. Where that is meant, the entry says `rope: none`.",
        "attention:\n  full: {heads: heads, kv_heads: kv_heads, head_dim: head_dim}",
        "attention:\n  full: {heads: heads, kv_heads: kv_heads, head_dim: head_dim, rope: main}",
    ),
    Code(
        "SPEC016",
        Stage.MEANING,
        "query heads that do not divide among key/value heads",
        "Each key/value head serves the same number of query heads, so `heads` is a multiple of `kv_heads`.",
        "attention:\n  full: {heads: 6, kv_heads: 4, head_dim: 64, rope: main}",
        "attention:\n  full: {heads: 8, kv_heads: 4, head_dim: 64, rope: main}",
    ),
    Code(
        "SPEC017",
        Stage.MEANING,
        "a branch that changes the shape",
        "What `add` adds to the stream, and what `sum` sums, must have one and the same width.",
        "block:\n  - add: [{norm: rms, weight: input_layernorm}, {linear: up_proj}]",
        "block:\n  - add: [{norm: rms, weight: input_layernorm}, {linear: up_proj}, {linear: down_proj}]",
    ),
    Code(
        "SPEC018",
        Stage.MEANING,
        "a weight that no step uses",
        "A tensor that is loaded and never used is memory lost, or a step forgotten. What the checkpoint holds but "
        "the model does not use is listed in `checkpoint.skip`.",
        "norms:\n"
        "  bare: {kind: rms, eps: eps, gain: none}\n"
        "block:\n"
        "  - add: [{norm: bare, weight: input_layernorm}, mlp]",
        "norms:\n  rms: {kind: rms, eps: eps}\nblock:\n  - add: [{norm: rms, weight: input_layernorm}, mlp]",
    ),
    Code(
        "SPEC019",
        Stage.MEANING,
        "a step without its weight",
        "The step multiplies by a learned weight, so it must name the module or tensor that holds it.",
        "block:\n  - add: [{norm: rms}, attention]",
        "block:\n  - add: [{norm: rms, weight: input_layernorm}, attention]",
    ),
    Code(
        "SPEC020",
        Stage.SHAPE,
        "a name that cannot be used",
        "Names of entries become names in generated Python, and the spec's own name becomes a folder: small "
        "letters, digits and `_`, a letter first, at most 40 characters, and no word that Python or the generated "
        "code already uses.",
        "kinds:\n  class: {attention: full}",
        "kinds:\n  full: {attention: full}",
    ),
    Code(
        "SPEC021",
        Stage.SHAPE,
        "a bad tensor name",
        "Tensor and module names are letters, digits, `_` and `-` joined by dots, with `*` for an index. Quotes, "
        "braces, blanks and slashes are refused, and `.weight` and `.bias` of a module are implied.",
        "block:\n  - gain: layers.{i}.scalar",
        "block:\n  - gain: layer_scalar",
    ),
    Code(
        "SPEC022",
        Stage.MEANING,
        "a bad expert layout",
        "A layout says how one file holds the experts: `stacked` with its `axes` (each of expert, out and in once) "
        "and `order`, or `per_expert` with one name a part. The layouts of a list must differ, so that exactly one "
        "can match.",
        "moe:\n  moe: {down: [{stacked: experts.down_proj, axes: [out, in]}]}",
        "moe:\n  moe: {down: [{stacked: experts.down_proj, axes: [expert, out, in]}]}",
    ),
    Code(
        "SPEC023",
        Stage.MEANING,
        "`require` or `defaults` that cannot hold",
        "`require` fences the spec: a field with a value, a list of values or `{min: n}`. A default that its own "
        "requirement rules out, or a field that both `require` and `ignore` name, would make the spec accept "
        "nothing.",
        "checkpoint:\n  defaults: {hidden_act: gelu}\n  require: {hidden_act: silu}",
        "checkpoint:\n  defaults: {hidden_act: silu}\n  require: {hidden_act: silu}",
    ),
    Code(
        "SPEC024",
        Stage.MEANING,
        "a `tiny` config that does not fit its spec",
        "`tiny` is the smallest config that shows every feature: the spec itself must accept it, every kind must "
        "occur, and every field in it must be read.",
        "tiny: {num_hidden_layers: 0}",
        "tiny: {num_hidden_layers: 2}",
    ),
    Code(
        "SPEC025",
        Stage.MEANING,
        "part of the language that is not implemented",
        "The language has a place for this, but no code is generated for it yet. It is refused so that it is never "
        "ignored.",
        "attention:\n  full: {kind: mla, q_rank: q_rank, kv_rank: kv_rank}",
        "attention:\n  full: {heads: heads, kv_heads: kv_heads, head_dim: head_dim, rope: main}",
    ),
    Code(
        "SPEC026",
        Stage.FILE,
        "a comma ended the text",
        "Between braces a comma starts the next key, so text that holds one must be quoted. A key between braces "
        "without a value is nearly always the rest of such a text; where nothing is meant, write `none` or `null`.",
        "norms:\n  rms: {kind: rms, why: the mean, not the variance}",
        'norms:\n  rms: {kind: rms, why: "the mean, not the variance"}',
    ),
    Code(
        "SPEC027",
        Stage.FILE,
        "a number that cannot be used",
        "Numbers are finite: integers of at most 64 bits with their sign, and floats within double precision.",
        "tiny: {rope_theta: .inf}",
        "tiny: {rope_theta: 1e6}",
    ),
    Code(
        "SPEC028",
        Stage.FILE,
        "not a spec file",
        "A spec is UTF-8 text of at most 1 MiB, nested at most 64 deep, whose top level is a mapping of field: value.",
        "- norms\n- ropes",
        "norms:\n  rms: {kind: rms, eps: eps}",
    ),
    Code(
        "SPEC029",
        Stage.MEANING,
        "an expression of the wrong type",
        "Sizes are integers, so they divide with `//`; `/` and `sqrt` give a float. Lists have no arithmetic, and "
        "`//` none for floats.",
        "attention:\n  full: {head_dim: hidden / heads}",
        "attention:\n  full: {head_dim: hidden // heads}",
    ),
)

CODES: dict[str, Code] = {entry.code: entry for entry in _ENTRIES}
"""Every diagnostic by its code."""
