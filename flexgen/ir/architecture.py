"""The resolved architecture: what the templates print, and nothing they would have to work out.

A `Size` is code over `dims.NAME`; the constructor of `Dims` alone has its own fields under `self.NAME`.
`path` is the spec path that a node comes from, as in `attention.full.scale`.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexgen.ir.bound import Checkpoint, Dim, Division, Grouping, Rope, RuleList, ScheduleRule
from flexgen.ir.code import Size


@dataclass(frozen=True)
class NormCall:
    """A norm applied somewhere: the runtime function, its gain, bias (None: it takes none) and epsilon, as code.

    `whole` says that it is over all heads at once.
    """

    function: str
    gain: str
    eps: Size | str
    why: str | None
    path: str
    bias: str | None = None
    whole: bool = False


@dataclass(frozen=True)
class Row:
    """One row of a weight table: a call of `make` in `flexgen.contract.weights`.

    roles      the weight, and its bias where the row can have one
    rows       of linear modules: each with its rows
    arguments  what follows, as code
    tensors    the checkpoint's full names
    merge      the function that merges adapters into it, None where they change nothing of it
    is_list    the call makes a list of weights
    """

    roles: tuple[str, ...]
    make: str
    arguments: tuple[str, ...]
    tensors: tuple[str, ...]
    rows: tuple[tuple[str, Size | str], ...] = ()
    fp32: bool = False
    merge: str | None = None
    is_list: bool = False
    transposed: bool = False

    @property
    def role(self) -> str:
        return self.roles[0]

    @property
    def code(self) -> str:
        return f"w.{self.role}.t()" if self.transposed else f"w.{self.role}"


@dataclass(frozen=True)
class WeightTable:
    """A function `NAME_weights(dims)`, and the rows that it returns."""

    function: str
    rows: tuple[Row, ...]
    path: str


@dataclass(frozen=True)
class Split:
    """One output of a fused projection: variable, and heads as code."""

    name: str
    heads: Size

    @property
    def variable(self) -> str:
        return f"{self.name}_TNH" if self.name == "q" else f"{self.name}_TKH"


@dataclass(frozen=True)
class Projection:
    """A projection of its own, of heads of one width, where q, k and v cannot be one: variable, weight, bias."""

    variable: str
    weight: str
    bias: str | None
    width: Size


@dataclass(frozen=True)
class Attention:
    """q, k and v are the `splits` of one `projection`, or come `apart`. A `value_dim` is one that is not `head_dim`."""

    name: str
    function: str
    projection: str | None
    bias: str | None
    splits: tuple[Split, ...]
    apart: tuple[Projection, ...]
    groups: bool
    clip: Size | None
    clip_last: bool
    packed_gate: bool
    gate: str | None
    gate_act: str | None
    value_from_key: bool
    value_scale: Size | None
    q_norm: NormCall | None
    k_norm: NormCall | None
    v_norm: NormCall | None
    norms_first: bool
    rope: str | None
    rotate: str
    query_scale: tuple[Size, ...]
    query_scale_fp32: bool
    heads: Size
    kv_heads: Size
    head_dim: Size
    value_dim: Size | None
    scale: Size | str
    window: Size | None
    chunk: Size | None
    alibi: Size | None
    sinks: str | None
    softcap: Size | None
    softmax_fp32: str | None
    kv_of: str | None
    o: str
    o_bias: str | None
    table: WeightTable
    path: str
    why: str | None


@dataclass(frozen=True)
class GatedDelta:
    name: str
    function: str
    key_heads: Size
    key_dim: Size
    value_heads: Size
    value_dim: Size
    channels: Size
    kernel: Size
    conv_act: str
    eps: Size
    table: WeightTable
    path: str
    why: str | None


@dataclass(frozen=True)
class Mlp:
    """`act` takes `acted` and its own `act_weights`; `gated` MLPs multiply the result with up."""

    name: str
    function: str
    act: str
    acted: str
    act_weights: tuple[str, ...]
    gated: bool
    gate_up: str
    gate_up_bias: str | None
    inner_norm: NormCall | None
    down: str
    down_bias: str | None
    out_gate: str | None
    arguments: tuple[str, ...]
    table: WeightTable
    path: str
    why: str | None


@dataclass(frozen=True)
class Moe:
    name: str
    route: str
    experts: str
    routed: str
    top_k: Size
    route_lines: tuple[Statement, ...]
    weights: str
    reads_stream: bool
    act: str
    layout: str
    interleaved: str | None
    gated: str | None
    weights_on: str | None
    gate_up: str
    gate_up_bias: str | None
    down: str
    down_bias: str | None
    alpha: Size | None
    limit: Size | None
    up_offset: Size | None
    grouping: Grouping | None
    table: WeightTable
    path: str
    why: str | None
    router_why: str | None


@dataclass(frozen=True)
class Statement:
    """One line of a generated function: `out = <op of input>`.

    op      fields used besides `out` and `input`
    norm    norm           linear  weight, bias    act    act, value    gain  weight      scale  value
    times   value          add     terms, norm     call   function, arguments (after w and input), slot
    embed   weight, value  name    nothing         code    value: the whole right side         positions  weight, value

    `slot` names the slot of the block that a call fills.
    """

    op: str
    out: str
    input: str
    path: str
    norm: NormCall | None = None
    weight: str | None = None
    bias: str | None = None
    act: str | None = None
    value: Size | str | None = None
    terms: tuple[str, ...] = ()
    function: str | None = None
    arguments: tuple[str, ...] = ()
    slot: str | None = None
    comment: str | None = None


@dataclass(frozen=True)
class Part:
    """One part of the block: its marker and its lines."""

    path: str
    statements: tuple[Statement, ...]


@dataclass(frozen=True)
class Block:
    """One function for the layers of all kinds that differ in nothing but the functions that fill `slots`."""

    function: str
    slots: tuple[str, ...]
    parts: tuple[Part, ...]
    result: Statement
    path: str = "block"


@dataclass(frozen=True)
class Kind:
    """A layer function: the block's own, or one that hands `fills` to the slots of `block`."""

    name: str
    function: str
    block: str
    fills: tuple[str, ...]
    mixers: tuple[str, ...]
    routes: tuple[tuple[str, Size], ...]
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
class Head:
    norm: NormCall
    weight: str
    bias: str | None
    fp32: bool
    scale: Size | None
    softcap: Size | None
    why: str | None


@dataclass(frozen=True)
class Merge:
    """A weight that adapters may change, and the function that merges them."""

    role: str
    function: str
    path: str


@dataclass(frozen=True)
class Imports:
    """The import lines of each module."""

    walker: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()
    merge: tuple[str, ...] = ()


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
    groupings: tuple[Grouping, ...]
    widths: tuple[Attention, ...]
    attentions: tuple[Attention, ...]
    gdns: tuple[GatedDelta, ...]
    mlps: tuple[Mlp, ...]
    moes: tuple[Moe, ...]
    layer_inputs: tuple[LayerInput, ...]
    blocks: tuple[Block, ...]
    kinds: tuple[Kind, ...]
    schedules: tuple[RuleList, ...]
    embedding: tuple[Statement, ...]
    head: Head
    tables: tuple[WeightTable, ...]
    merges: tuple[Merge, ...]
    layer: str
    imports: Imports = Imports()

    @property
    def rules(self) -> tuple[ScheduleRule, ...]:
        """The rules of all schedules."""
        return tuple(rule for each in self.schedules for rule in each.rules)

    @property
    def model_table(self) -> WeightTable:
        """Weights that are no layer's."""
        return self.tables[0]

    @property
    def block_tables(self) -> tuple[WeightTable, ...]:
        """Weights of the block's own steps."""
        return tuple(table for table in self.tables if table.path == "block")
