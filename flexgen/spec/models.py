"""The spec's sections as typed, frozen models: what a YAML file may say, field by field.

The field docs are the reference: the JSON Schema and `docs/spec.md` are made from them. Numbers are kept as source
text (`Text`) and parsed later, because `flexgen.ir` owns what names mean. Nothing here looks at another section.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from flexgen.spec.checkpoint import Checkpoint
from flexgen.spec.diagnostics import SpecPath
from flexgen.spec.fields import (
    MAX_ENTRIES,
    Activation,
    ConfigPath,
    Entry,
    Identifier,
    Section,
    TensorName,
    TensorPattern,
    Text,
    form,
)


class Norm(Entry):
    kind: Literal["rms", "layer", "l2"] = Field(
        description="`rms` divides by the root of the mean square, `layer` subtracts the mean first, `l2` divides by the length."
    )
    gain: Literal["plain", "one_plus", "none"] = Field(
        "plain", description="What the weight means: w, 1 + w, or no weight at all."
    )
    bias: Text = Field("false", description="Of `layer`: whether a bias is added: true, false, or a dim that is a flag.")
    cast: Literal["before", "after"] = Field(
        "after",
        description="Whether the product with the weight is taken after the cast to the model's dtype (cast `before`) or in fp32.",
    )
    eps: Text = Field(description="Added to the mean square, the variance or the squared length.")


class RopeEntry(Entry):
    parameters: ConfigPath = Field(description="Where config.json keeps this table's parameters.")
    types: list[Literal["default", "linear", "llama3", "yarn", "proportional", "longrope"]] = Field(
        min_length=1, description="The rope types that this family uses; any other is refused."
    )
    turned: Text | None = Field(
        None, description="Dims of a head that turn; absent: all, or the share that `partial_rotary_factor` says."
    )
    layout: Literal["halves", "pairs"] = Field(
        "halves", description="What turns together: dim j with dim j + d/2, or dim 2j with dim 2j + 1 (GPT-J's way)."
    )
    compute: Literal["model", "fp32"] = Field("model", description="The dtype of the tables and of the turning.")
    tables: Literal["compute", "model"] = Field(
        "compute", description="What cos and sin are rounded to before they turn: the dtype of `compute`, or the model's."
    )


class PackedGate(Section):
    packed: Literal["q"] = Field(description="Where the gate comes from: each head of `q` is followed by its gate.")
    act: Literal["sigmoid"] = Field(description="The gate's activation.")


class ProjectedGate(Section):
    weight: TensorName = Field(description="Module of the gate's own projection of the attention's input.")
    over: Literal["channel", "head"] = Field("channel", description="One gate a channel of the output, or one a head.")
    act: Literal["sigmoid", "softplus"] = Field(description="The gate's activation; `softplus` is taken in fp32.")


def _gate_tag(value: object) -> str | None:
    if isinstance(value, str):
        return "form:none"
    return form(value, "packed", "weight")


OutputGate = Annotated[
    Annotated[PackedGate, Tag("form:packed")]
    | Annotated[ProjectedGate, Tag("form:weight")]
    | Annotated[Literal["none"], Tag("form:none")],
    Discriminator(_gate_tag),
]


class QueryScale(Section):
    """q * (1 + beta * log(1 + floor((position + offset) / length))): sharper attention far from the start."""

    beta: Text = Field(description="Weight of the logarithm.")
    length: Text = Field(description="Positions after which the logarithm begins to grow.")
    offset: Text = Field("0", description="Added to positions, which count from 0.")
    compute: Literal["model", "fp32"] = Field("model", description="The dtype that the factor multiplies in.")


class Attention(Entry):
    heads: Text = Field(description="Query heads.")
    kv_heads: Text = Field(description="Key and value heads; must divide `heads`.")
    head_dim: Text = Field(description="Width of one head.")
    value_dim: Text | None = Field(None, description="Width of a value head where that is not `head_dim`, which it may not exceed.")
    rope: Identifier | Literal["none"] = Field(description="A name of `ropes`, or `none` for no positions.")
    window: Text = Field(
        "none", description="Keys visible to a query, itself included. `none`, or a dim `FIELD or none` where that is null: all before it."
    )
    chunk: Text = Field("none", description="Positions are cut into chunks this long, and a query sees its own chunk alone.")
    alibi: Text = Field(
        "none", description="Linear biases by distance in place of a rope: what ALiBi's slopes are multiplied by, mostly 1."
    )
    scale: Text | None = Field(None, description="Multiplies the scores; absent: one over the root of `head_dim`.")
    bias: Text = Field("false", description="Whether q, k, v and o have biases: true, false, or a dim that is a flag.")
    q_bias: Text | None = Field(None, description="Whether q has a bias, where that differs from `bias`; k, v and o likewise.")
    k_bias: Text | None = Field(None, description="Whether k has a bias, where that differs from `bias`.")
    v_bias: Text | None = Field(None, description="Whether v has a bias, where that differs from `bias`.")
    o_bias: Text | None = Field(None, description="Whether o has a bias, where that differs from `bias`.")
    clip: Text = Field("none", description="q, k and v are clamped to this on both sides; 0 is off.")
    clip_when: Literal["before_norms", "after_norms"] = Field("before_norms", description="Whether the clamp precedes the norms.")
    q_norm: Identifier | Literal["none"] = Field("none", description="Norm of the queries; `qk_norm_over` says over what.")
    k_norm: Identifier | Literal["none"] = Field("none", description="Norm of the keys; `qk_norm_over` says over what.")
    v_norm: Identifier | Literal["none"] = Field("none", description="Norm of each value head.")
    qk_norm_over: Literal["head", "projection", "head_weights"] = Field(
        "head",
        description="q and k norms are over each head, over the whole `projection`, or over each head with weights of its own.",
    )
    qk_norm_when: Literal["before_rope", "after_rope"] = Field("before_rope", description="Whether q and k norms precede rope.")
    query_scale: QueryScale | None = Field(None, description="A factor on queries that grows with their position.")
    value: Literal["projected", "from_key"] = Field(
        "projected", description="`from_key`: the value is the raw key projection, before its norm and rope."
    )
    value_scale: Text = Field("1", description="Multiplies the values.")
    gate: OutputGate = Field("none", description="A gate on the attention's output.")
    sinks: TensorName | Literal["none"] = Field("none", description="Tensor of one extra logit a query head.")
    softcap: Text = Field("none", description="Scores become cap * tanh(score / cap).")
    softmax: Literal["fp32", "model"] = Field("fp32", description="The dtype the softmax is taken in.")
    kv_of: Identifier | Literal["none"] = Field(
        "none", description="Read the keys and values of the last layer before this one that has the named attention."
    )
    packed: Literal["none", "rows", "groups"] = Field(
        "none",
        description="How one module `qkv` of the file holds all three: `rows` q, k, v end to end; `groups`: key/value head after "
        "key/value head, each as its queries, its key, its value (one query each: per head [q k v]).",
    )
    qkv: TensorName = Field("self_attn.qkv_proj", description="Module of the packed projection.")
    q: TensorName = Field("self_attn.q_proj", description="Module of the query projection.")
    k: TensorName = Field("self_attn.k_proj", description="Module of the key projection.")
    v: TensorName = Field("self_attn.v_proj", description="Module of the value projection.")
    o: TensorName = Field("self_attn.o_proj", description="Module of the output projection.")
    q_norm_weight: TensorName = Field("self_attn.q_norm", description="Module of the query norm.")
    k_norm_weight: TensorName = Field("self_attn.k_norm", description="Module of the key norm.")
    v_norm_weight: TensorName = Field("self_attn.v_norm", description="Module of the value norm.")
    skip: list[TensorPattern] = Field(
        [], description="Tensors a file may hold for these layers although nothing reads them."
    )


class GatedDelta(Entry):
    key_heads: Text = Field(description="Heads of queries and keys.")
    key_dim: Text = Field(description="Width of one query or key head.")
    value_heads: Text = Field(description="Heads of values; a multiple of `key_heads`.")
    value_dim: Text = Field(description="Width of one value head.")
    kernel: Text = Field(description="Taps of the causal depthwise convolution.")
    conv_act: Literal["silu"] = Field(description="Activation after the convolution.")
    norm_act: Literal["silu"] = Field(description="Activation of the gate on the output norm.")
    eps: Text = Field(description="The output norm's epsilon.")
    packing: Literal["qkv_z_b_a"] = Field(
        "qkv_z_b_a", description="How the input projections are split in the checkpoint."
    )
    qkv: TensorName = Field("linear_attn.in_proj_qkv", description="Module of the packed q, k, v projection.")
    z: TensorName = Field("linear_attn.in_proj_z", description="Module of the output gate's projection.")
    b: TensorName = Field("linear_attn.in_proj_b", description="Module of the write strength (beta).")
    a: TensorName = Field("linear_attn.in_proj_a", description="Module of the decay's input.")
    conv: TensorName = Field("linear_attn.conv1d", description="Module of the convolution.")
    a_log: TensorName = Field("linear_attn.A_log", description="Tensor of the decay's logarithm.")
    dt_bias: TensorName = Field("linear_attn.dt_bias", description="Tensor added to the decay's input.")
    norm: TensorName = Field("linear_attn.norm", description="Module of the gated output norm.")
    out: TensorName = Field("linear_attn.out_proj", description="Module of the output projection.")


class Mlp(Entry):
    size: Text = Field(description="Inner width.")
    act: Literal[Activation, "xielu"] = Field(
        description="Activation of the gate; without a gate, of up. `xielu` has two weights, in the module `act_fn`."
    )
    gated: bool = Field(True, description="Whether act(gate) multiplies up; else the MLP is down(act(up)).")
    bias: Text = Field("false", description="Whether gate, up and down have biases.")
    down_bias: Text | None = Field(None, description="Whether down has a bias, where that differs from gate and up.")
    at: TensorName | Literal["none"] = Field("mlp", description="The module that holds gate, up and down; `none`: the layer.")
    gate: TensorName = Field("gate_proj", description="Module of the gate, below `at`.")
    up: TensorName = Field("up_proj", description="Module of up, below `at`.")
    down: TensorName = Field("down_proj", description="Module of down, below `at`.")
    gate_up: TensorName | Literal["none"] = Field(
        "none", description="One module, below `at`, whose rows are those of the gate and then those of up."
    )
    gate_scale: Text = Field("1", description="Multiplies the gate before its activation.")
    inner_norm: Identifier | Literal["none"] = Field("none", description="Norm of what down reads.")
    inner_norm_weight: TensorName = Field("mlp.ffn_layernorm", description="Module of that norm.")
    out_gate: TensorName | Literal["none"] = Field(
        "none", description="Module of a one-row projection of the input whose sigmoid multiplies the output."
    )


class RouterGroups(Section):
    count: Text = Field(description="Groups of equally many experts, in the order of the experts.")
    keep: Text = Field(description="Groups that a token may choose from: those of the highest rank.")
    rank: Literal["best_two", "best"] = Field(description="A group's rank: the sum of its two best scores, or its best score.")


class Router(Entry):
    weight: TensorName = Field(description="Module of the router.")
    compute: Literal["model", "fp32"] = Field("model", description="The dtype of the product with `weight`.")
    bias: Text = Field("false", description="Whether the router has a bias.")
    reads: Literal["input", "stream"] = Field(
        "input", description="`stream`: the router reads the stream at the start of this `add`, not the experts' input."
    )
    input: list[Step] = Field([], description="Steps applied to what the router reads.")
    score: Literal["softmax", "sigmoid", "none"] = Field(
        "none", description="Turns logits into scores before the choice."
    )
    choice_bias: TensorName | Literal["none"] = Field(
        "none", description="Tensor of one number an expert, added to the scores for the choice alone: weights are made without it."
    )
    choice_bias_axes: Literal["expert", "one_expert"] = Field(
        "expert", description="The axes of that tensor: `one_expert` has a first axis of length 1."
    )
    softcap: Text = Field("none", description="Logits become cap * tanh(logit / cap), in fp32; 0 is off.")
    groups: RouterGroups | Literal["none"] = Field("none", description="Experts come in groups, of which a token may use some.")
    after_top_k: Literal["softmax", "sigmoid", "sparsemixer", "none"] = Field(
        "none",
        description=(
            "Applied to the chosen values. `sparsemixer`: the weight of each choice is its softmax among the scores that are no "
            "further than `jitter` from it, experts chosen before it left out."
        ),
    )
    jitter: Text = Field("none", description="Of `sparsemixer`: half of how far below the chosen score others may be, over the larger.")
    normalise: Text = Field("false", description="Divide the chosen weights by their sum: true, false or a flag.")
    normalise_eps: Text = Field("0", description="Added to that sum.")
    normalise_floor: Text = Field("0", description="The least that the sum counts as.")
    scale: Text = Field("1", description="Multiplies the weights.")
    gain: TensorName | Literal["none"] = Field(
        "none", description="Tensor of one factor an expert, on the chosen weights."
    )
    dtype: Literal["model", "fp32"] = Field(
        "model", description="The dtype of the weights that multiply experts' outputs."
    )


class StackedLayout(Section):
    stacked: TensorName = Field(description="One tensor holds all experts.")
    axes: list[Literal["expert", "out", "in"]] = Field(
        min_length=3, max_length=3, description="The tensor's axes in order."
    )
    order: Literal["interleaved"] | list[Literal["gate", "up"]] | None = Field(
        None, description="How gate and up share the out axis: [gate, up] halves, or `interleaved` columns."
    )


class PerExpertLayout(Section):
    per_expert: list[TensorPattern] = Field(
        min_length=1,
        max_length=2,
        description="One tensor an expert, in the order of their rows; `*` is the expert.",
    )


class Mxfp4Layout(Section):
    mxfp4: TensorName = Field(description="NAME_blocks and NAME_scales: 4-bit values, dequantised on load.")


def _layout_tag(value: object) -> str | None:
    return form(value, "stacked", "per_expert", "mxfp4")


Layout = Annotated[
    Annotated[StackedLayout, Tag("form:stacked")]
    | Annotated[PerExpertLayout, Tag("form:per_expert")]
    | Annotated[Mxfp4Layout, Tag("form:mxfp4")],
    Discriminator(_layout_tag),
]


GATE_UP: list[Layout] = [
    StackedLayout(stacked="mlp.experts.gate_up_proj", axes=["expert", "out", "in"], order=["gate", "up"]),
    PerExpertLayout(per_expert=["mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"]),
]
DOWN: list[Layout] = [
    StackedLayout(stacked="mlp.experts.down_proj", axes=["expert", "out", "in"], order=None),
    PerExpertLayout(per_expert=["mlp.experts.*.down_proj.weight"]),
]
"""What most files hold: all experts in one tensor, as transformers saves them, or each its own."""


class Moe(Entry):
    experts: Text = Field(description="Number of experts.")
    top_k: Text = Field(description="Experts a token uses.")
    size: Text = Field(description="Inner width of one expert.")
    act: Activation = Field(description="Activation of the gate; of up where there is no gate.")
    alpha: Text = Field("none", description="Slope inside the gate's sigmoid: gate * sigmoid(alpha * gate).")
    limit: Text = Field("none", description="Clamp: gate from above, up from both sides.")
    up_offset: Text = Field("0", description="Added to up before the product.")
    router: Router = Field(description="How tokens choose experts.")
    weights_on: Literal["output", "input"] = Field(
        "output", description="Whether an expert's weight multiplies what it gives or what it reads."
    )
    gate_up: list[Layout] = Field(
        GATE_UP,
        min_length=1,
        description="Forms a file may hold gate and up in; the first stacked one is memory's. Absent: `mlp.experts.gate_up_proj`, stacked "
        "[expert, out, in] with gate and then up, or `mlp.experts.*.gate_proj` and `up_proj`.",
    )
    up: list[Layout] = Field([], description="In place of `gate_up`, of experts without a gate: act(up), then down.")
    gate_up_bias: TensorName | Literal["none"] = Field("none", description="Tensor of the biases of gate and up, or of up alone.")
    down: list[Layout] = Field(
        DOWN, min_length=1, description="Forms a file may hold down in. Absent: `mlp.experts.down_proj`, or `mlp.experts.*.down_proj`."
    )
    down_bias: TensorName | Literal["none"] = Field("none", description="Tensor of the biases of down.")


class NormStep(Entry):
    norm: Identifier = Field(description="A name of `norms`.")
    weight: TensorName | None = Field(
        None, description="Module of the norm's weight; absent where the norm has no gain."
    )


class LinearStep(Entry):
    linear: TensorName = Field(description="Module of the projection.")
    size: Text | None = Field(None, description="Width of the result.")


class ActStep(Entry):
    act: Activation = Field(description="An activation.")


class GainStep(Entry):
    gain: TensorName = Field(description="Tensor to multiply by.")
    size: Text | None = Field(None, description="Its length; absent: the width of what it multiplies.")


class ScaleStep(Entry):
    scale: Text = Field(description="Number to multiply by.")


class TimesStep(Entry):
    times: Identifier = Field(description="A name of `layer_inputs`: multiply by this layer's slice of it.")


class SumStep(Entry):
    sum: list[list[Step]] = Field(min_length=2, description="Branches that read the same value and are added.")


class EmbeddingStep(Entry):
    embedding: TensorName = Field(description="Module of a table indexed by token id.")
    vocab: Text = Field(description="Rows of the table.")
    scale: Text = Field("1", description="Number to multiply by.")
    scale_dtype: Literal["model", "fp32"] = Field(
        "fp32", description="Whether the number is rounded to the model's dtype."
    )


_STEPS = ("embedding", "norm", "linear", "act", "gain", "scale", "times", "sum")


def _step_tag(value: object) -> str | None:
    if isinstance(value, str):
        return "form:name"
    return form(value, *_STEPS)


Step = Annotated[
    Annotated[Identifier, Tag("form:name")]
    | Annotated[EmbeddingStep, Tag("form:embedding")]
    | Annotated[NormStep, Tag("form:norm")]
    | Annotated[LinearStep, Tag("form:linear")]
    | Annotated[ActStep, Tag("form:act")]
    | Annotated[GainStep, Tag("form:gain")]
    | Annotated[ScaleStep, Tag("form:scale")]
    | Annotated[TimesStep, Tag("form:times")]
    | Annotated[SumStep, Tag("form:sum")],
    Discriminator(_step_tag),
]


class AddPart(Entry):
    add: list[Step] = Field(min_length=1, description="A residual branch: its result is added to the stream.")
    in_turn: bool = Field(
        False, description="Whether the terms of the `sum` that ends it are added to the stream one after another, not their sum."
    )


def _part_tag(value: object) -> str | None:
    return form(value, "add", "gain", "scale")


BlockPart = Annotated[
    Annotated[AddPart, Tag("form:add")] | Annotated[GainStep, Tag("form:gain")] | Annotated[ScaleStep, Tag("form:scale")],
    Discriminator(_part_tag),
]


class LayerInput(Entry):
    size: Text = Field(description="Width of one layer's slice.")
    steps: list[Step] = Field(min_length=1, description="Steps from the embedded tokens to all layers' slices.")


Filling = Annotated[
    Annotated[Identifier, Tag("form:name")] | Annotated[Annotated[list[Identifier], Field(min_length=2)], Tag("form:list")],
    Discriminator(lambda value: "form:list" if isinstance(value, list) else "form:name"),
]
"""What fills a slot: a part, `none`, or several parts that are summed."""

SELECTORS = ("all", "pattern", "every", "first", "last", "from", "at", "by")


class Rule(Entry):
    """One rule of the schedule; later ones win. Exactly one selector: all, pattern, every, first, last, from, at or by."""

    all: Literal[True] | None = Field(None, description="Every layer.")
    pattern: list[Identifier] | None = Field(None, min_length=1, description="Kinds repeated over the depth.")
    every: Text | None = Field(None, description="Layers n, 2n, 3n, ... counted from 1.")
    first: Text | None = Field(None, description="The first n layers.")
    last: Text | None = Field(None, description="The last n layers.")
    from_: Text | None = Field(None, alias="from", description="Layers from index n on.")
    at: ConfigPath | None = Field(None, description="A config field that lists layer indices.")
    by: ConfigPath | None = Field(None, description="A config field that lists one value a layer: texts, numbers or flags.")
    kind: Identifier | None = Field(None, description="The kind these layers get.")
    kinds: dict[str, Identifier] | None = Field(
        None,
        min_length=1,
        description="With `by`: value (text, number, true or false) to kind. Otherwise: what earlier rules chose to what it becomes.",
    )
    when: ConfigPath | None = Field(None, description="A config flag or number that turns the rule on; absent, false or 0 do not.")

    def given(self, selector: str) -> Any:
        """The value of a selector, by the name that a spec calls it by; None where it is not given."""
        return getattr(self, "from_" if selector == "from" else selector)

    @property
    def selectors(self) -> tuple[str, ...]:
        """The selectors that are given; a spec without mistakes gives one."""
        return tuple(name for name in SELECTORS if self.given(name) is not None)


class Positions(Section):
    weight: TensorName = Field(description="Module of a table of one row a position, added to the embedded tokens.")
    length: Text = Field(description="Positions that the table has.")
    offset: Text = Field("0", description="Rows before that of position 0.")


Rules = Annotated[list[Rule], Field(min_length=1, max_length=MAX_ENTRIES)]
Schedule = Annotated[
    Annotated[Rules, Tag("form:list")]
    | Annotated[Annotated[dict[Identifier, Rules], Field(min_length=1, max_length=MAX_ENTRIES)], Tag("form:slots")],
    Discriminator(lambda value: "form:slots" if isinstance(value, dict) else "form:list"),
]


@dataclass(frozen=True)
class RuleList:
    """A list of rules, where it stands, and the slot that it is for: None where the kinds fill all."""

    slot: str | None
    path: SpecPath
    rules: tuple[Rule, ...]


class Embedding(Entry):
    weight: TensorName = Field(description="Module of the token embedding.")
    scale: Text = Field("1", description="Multiplies the embedded tokens.")
    scale_dtype: Literal["model", "fp32"] = Field(
        "fp32", description="Whether the scale is rounded to the model's dtype."
    )
    positions: Positions | None = Field(None, description="Learned absolute positions.")
    norm: NormStep | None = Field(None, description="The norm of the embedded tokens.")


class Head(Entry):
    norm: NormStep = Field(description="The norm before the head.")
    weight: TensorName = Field(description="Module of the head, by its full name.")
    tied: Text = Field("false", description="Whether the head is the embedding: true, false or a flag.")
    bias: Text = Field("false", description="Whether the head has a bias: true, false or a flag.")
    scale: Text = Field("1", description="Multiplies the logits; a config's divisor is `1 / NAME`.")
    dtype: Literal["model", "fp32"] = Field("model", description="`fp32`: logits are cast before the factor and the cap.")
    softcap: Text = Field("none", description="Logits become cap * tanh(logit / cap); 0 is off.")


class SpecModel(Section):
    """One family of language models."""

    flexgen: Literal[1] = Field(description="Version of the language.")
    name: Identifier = Field(description="Name of the spec, of its file and of its generated package.")
    summary: str = Field(min_length=1, max_length=200, description="One sentence: becomes the generated docstring.")
    checkpoint: Checkpoint = Field(description="Which files this spec reads, and how their tensors are named.")
    dims: dict[Identifier, Text] = Field(
        max_length=MAX_ENTRIES, description="Numbers and flags from config.json, in order; each may use earlier ones."
    )
    norms: dict[Identifier, Norm] = Field({}, max_length=MAX_ENTRIES, description="Named norms.")
    ropes: dict[Identifier, RopeEntry] = Field({}, max_length=MAX_ENTRIES, description="Named rotary tables.")
    attention: dict[Identifier, Attention] = Field({}, max_length=MAX_ENTRIES, description="Named attentions.")
    gdn: dict[Identifier, GatedDelta] = Field(
        {}, max_length=MAX_ENTRIES, description="Named gated-delta mixers (linear attention with a state)."
    )
    mlp: dict[Identifier, Mlp] = Field({}, max_length=MAX_ENTRIES, description="Named MLPs.")
    moe: dict[Identifier, Moe] = Field({}, max_length=MAX_ENTRIES, description="Named layers of routed experts.")
    layer_inputs: dict[Identifier, LayerInput] = Field(
        {}, max_length=MAX_ENTRIES, description="Values computed once from the tokens, one slice a layer."
    )
    kinds: dict[Identifier, dict[Identifier, Filling]] = Field(
        {"layer": {}},
        min_length=1,
        max_length=MAX_ENTRIES,
        description=(
            "Layer kinds; each fills every slot of the block with a named part, a list of parts that are summed, or `none`: what "
            "calls an empty slot, an `add` or a branch of a `sum`, is left out. Where `schedule` has a list a slot, each fills one slot. "
            "Absent where all layers are alike and the block names its parts itself."
        ),
    )
    schedule: Schedule = Field(
        [],
        description=(
            "Which layer has which kind: a list of rules, of which later ones win. Or a list of rules for each slot, which cross: a "
            "layer that is `sliding` by one and `sparse` by the other is of kind `sliding_sparse`. Absent where there is one kind."
        ),
    )
    block: list[BlockPart] = Field(min_length=1, max_length=MAX_ENTRIES, description="What one layer computes, as a sum.")
    embedding: Embedding = Field(description="From token ids to the stream.")
    head: Head = Field(description="From the stream to logits.")
    tiny: dict[str, Any] = Field(description="The smallest config.json that shows every feature of the spec.")

    @property
    def schedules(self) -> tuple[RuleList, ...]:
        """The lists of rules: one for whole kinds, or one a slot."""
        if isinstance(self.schedule, dict):
            return tuple(RuleList(slot, ("schedule", slot), tuple(rules)) for slot, rules in self.schedule.items())
        rules = self.schedule or [Rule.model_validate({"all": True, "kind": next(iter(self.kinds))})]
        return (RuleList(None, ("schedule",), tuple(rules)),)

    @property
    def rules(self) -> tuple[tuple[SpecPath, Rule], ...]:
        """Every rule of the schedule, and where it stands."""
        return tuple(((*each.path, i), rule) for each in self.schedules for i, rule in enumerate(each.rules))


SECTIONS_WITH_LIKE = ("norms", "ropes", "attention", "gdn", "mlp", "moe")
for _model in (Router, SumStep, AddPart, LayerInput, Moe, SpecModel):
    _model.model_rebuild()
