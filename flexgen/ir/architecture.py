"""The resolved architecture: what the templates print, and nothing they would have to work out.

Strings called *code* are Python expressions: over `dims.NAME` in functions, over `d.NAME` in tables, over earlier
locals in `Dims.from_config`. `path` is the spec path that a node comes from, as in `attention.full.scale`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Dim:
    """One line of `Dims` and of `Dims.from_config`."""

    name: str
    type: Literal["int", "float", "bool"]
    read: str
    source: str
    path: str


@dataclass(frozen=True)
class Rope:
    name: str
    parameters: str
    types: tuple[str, ...]
    head_dim: str
    path: str
    why: str | None


@dataclass(frozen=True)
class NormCall:
    """A norm applied somewhere: the runtime function, its gain and its epsilon, as code."""

    function: str
    gain: str
    eps: str
    why: str | None
    path: str


@dataclass(frozen=True)
class Row:
    """One row of a weight table: `Weight(role, shape, parts or layouts, ...)`."""

    role: str
    shape: tuple[str, ...]
    parts: tuple[tuple[str, str], ...] = ()
    layouts: tuple[str, ...] = ()
    fp32: bool = False
    present: str | None = None
    same_as: str | None = None
    same_when: str | None = None


@dataclass(frozen=True)
class WeightTable:
    """A function `NAME_weights(d)` of the generated walker, and the entries that share it."""

    function: str
    rows: tuple[Row, ...]
    path: str


@dataclass(frozen=True)
class Split:
    """One output of a fused projection: variable, and rows as code."""

    name: str
    rows: str


@dataclass(frozen=True)
class Attention:
    name: str
    function: str
    projection: str
    bias: str
    splits: tuple[Split, ...]
    packed_gate: bool
    value_from_key: bool
    q_norm: NormCall | None
    k_norm: NormCall | None
    v_norm: NormCall | None
    rope: str | None
    heads: str
    kv_heads: str
    head_dim: str
    scale: str
    window: str | None
    softcap: str | None
    sinks: bool
    softmax_fp32: bool
    kv_of: str | None
    o_bias: str
    table: WeightTable
    path: str
    why: str | None


@dataclass(frozen=True)
class GatedDelta:
    name: str
    function: str
    key_heads: str
    key_dim: str
    value_heads: str
    value_dim: str
    kernel: str
    conv_act: str
    eps: str
    table: WeightTable
    path: str
    why: str | None


@dataclass(frozen=True)
class Mlp:
    name: str
    function: str
    act: str
    gate_up: str
    gate_up_bias: str
    down: str
    down_bias: str
    out_gate: str | None
    table: WeightTable
    path: str
    why: str | None


@dataclass(frozen=True)
class Moe:
    name: str
    route: str
    experts: str
    routed: str
    top_k: str
    router_input: tuple[Statement, ...]
    router: str
    router_bias: str
    reads_stream: bool
    score: str
    after_top_k: str
    normalise: str | None
    gain: str | None
    weights_fp32: bool
    act: str
    layout: str
    interleaved: bool
    gate_up: str
    gate_up_bias: str
    down: str
    down_bias: str
    alpha: str | None
    limit: str | None
    up_offset: str | None
    table: WeightTable
    path: str
    why: str | None
    router_why: str | None


@dataclass(frozen=True)
class Statement:
    """One line of a generated function: `out = <op of input>`.

    op      fields used besides `out` and `input`
    norm    norm           linear  weight, bias    act    act, value    gain  weight      scale  value
    times   value          add     terms, norm     call   function, arguments (between input and dims), writes
    embed   weight, value  name    nothing
    """

    op: str
    out: str
    input: str
    path: str
    norm: NormCall | None = None
    weight: str | None = None
    bias: str | None = None
    act: str | None = None
    value: str | None = None
    terms: tuple[str, ...] = ()
    function: str | None = None
    arguments: tuple[str, ...] = ()
    comment: str | None = None


@dataclass(frozen=True)
class Part:
    """One part of the block: its marker and its lines."""

    path: str
    statements: tuple[Statement, ...]


@dataclass(frozen=True)
class Kind:
    name: str
    function: str
    parts: tuple[Part, ...]
    result: Statement
    mixers: tuple[str, ...]
    routes: tuple[tuple[str, str], ...]
    tables: tuple[str, ...]
    inputs: tuple[str, ...]
    path: str


@dataclass(frozen=True)
class LayerInput:
    """A value computed once from the embedded tokens, one slice a layer."""

    name: str
    variable: str
    statements: tuple[Statement, ...]
    path: str
    why: str | None


@dataclass(frozen=True)
class ScheduleRule:
    """`selector(arguments, target, when=...)` of the runtime's schedule, as code."""

    selector: str
    arguments: str
    target: str
    when: str | None
    path: str
    why: str | None


@dataclass(frozen=True)
class Division:
    """Two numbers, the first a multiple of the second, which only a config can tell: `what` has `many` and `few`."""

    what: str
    many: str
    many_code: str
    few: str
    few_code: str


@dataclass(frozen=True)
class Head:
    norm: NormCall
    weight: str
    softcap: str | None
    why: str | None


@dataclass(frozen=True)
class Checkpoint:
    model_types: tuple[str, ...]
    text_config: str | None
    prefixes: tuple[str, ...]
    skip: tuple[str, ...]
    defaults: dict
    require: dict
    ignore: tuple[str, ...]
    layers_by: str | None


@dataclass(frozen=True)
class MergeRole:
    """One function of merge.py: a fused dense weight (`parts`) or a stacked expert tensor (`module`), whose adapters may
    also be modules of one expert each, `per_expert`, in the order of their rows."""

    role: str
    parts: tuple[tuple[str, str], ...] = ()
    module: str | None = None
    per_expert: tuple[str, ...] = ()
    transpose: bool = False
    path: str = ""


@dataclass(frozen=True)
class Adapted:
    """A module that adapters may change, and the weights that hold it: another one where kinds pack it differently."""

    module: str
    roles: tuple[str, ...]


@dataclass(frozen=True)
class Architecture:
    """A whole spec. `digest` stands for all that it says; comments and the order of keys do not change it."""

    name: str
    summary: str
    source: str
    digest: str
    checkpoint: Checkpoint
    dims: tuple[Dim, ...]
    ropes: tuple[Rope, ...]
    divisions: tuple[Division, ...]
    attentions: tuple[Attention, ...]
    gdns: tuple[GatedDelta, ...]
    mlps: tuple[Mlp, ...]
    moes: tuple[Moe, ...]
    layer_inputs: tuple[LayerInput, ...]
    kinds: tuple[Kind, ...]
    schedule: tuple[ScheduleRule, ...]
    embedding: Statement
    head: Head
    tables: tuple[WeightTable, ...]
    merges: tuple[MergeRole, ...]
    adapted: tuple[Adapted, ...]
