# Generated from specs/gemma4_e.yaml. Do not edit: change the spec or the templates,
# then run `flexgen build specs/gemma4_e.yaml`.
"""Gemma 4 E2B and E4B: per-layer input embeddings, and last layers that read the K/V of earlier ones.

T tokens of one step   D model width   I inner width   E experts   V vocabulary   R rows that want logits
w the layer's weights, pages and state   d, dims the checkpoint's numbers
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from flexgen.contract import layer_kinds as schedule
from flexgen.contract.abi import Layer, Pages, Part, SharedPages, State, Step, Weight
from flexgen.runtime.loading.config import Config
from flexgen.errors import ConfigError
from flexgen.runtime.ops.elementwise import project, rms_norm, rounded, softcap
from flexgen.runtime.loading.rope import Rope

from .attention import full_attention, full_shared_attention, sliding_attention, sliding_shared_attention

ABI = 2
# checkpoint
MODEL_TYPES = ("gemma4_text", "gemma4")
TEXT_CONFIG = "text_config"
PREFIXES = ("model", "model.language_model")
SKIP = (
    "model.vision_tower.*", "model.audio_tower.*", "model.embed_vision.*", "model.embed_audio.*",
    "layers.*.self_attn.k_proj.weight", "layers.*.self_attn.v_proj.weight", "layers.*.self_attn.k_norm.weight",
)
DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "use_bidirectional_attention": None,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "num_kv_shared_layers": 0,
    "enable_moe_block": False,
    "attention_k_eq_v": False,
    "use_double_wide_mlp": False,
    "global_head_dim": 512,
    "sliding_window": 512,
}
REQUIRE = {
    "hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": [None, "vision"], "enable_moe_block":
    False, "attention_k_eq_v": False, "hidden_size_per_layer_input": {"min": 1}, "num_kv_shared_layers": {"min": 1},
}
IGNORE = ("num_global_key_value_heads",)


@dataclass(frozen=True)
class Dims:
    """The numbers of one checkpoint."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    full_head_dim: int
    window: int
    size: int
    wide_size: int
    shared_layers: int
    input_size: int
    input_vocab: int
    eps: float
    attention_bias: bool
    softcap: float
    tied: bool
    sliding_rope: Rope
    full_rope: Rope
    kinds: tuple[str, ...]

    @classmethod
    def from_config(cls, raw: dict, ignore: tuple[str, ...] = ()) -> Dims:
        """Bind the numbers to a config.json. Raises ConfigError for whatever this package does not describe."""
        config = Config(
            raw, model_types=MODEL_TYPES, defaults=DEFAULTS, require=REQUIRE, ignore=(*IGNORE, *ignore), layers_by="layer_types"
        )
        vocab = config.int("vocab_size")
        hidden = config.int("hidden_size")
        layers = config.int("num_hidden_layers")
        heads = config.int("num_attention_heads")
        kv_heads = config.int("num_key_value_heads")
        head_dim = config.int("head_dim")
        full_head_dim = config.int("layers.full_attention.head_dim", "global_head_dim")
        window = config.int("sliding_window")
        size = config.int("intermediate_size")
        wide_size = size * (1 + config.number("use_double_wide_mlp"))
        shared_layers = config.int("num_kv_shared_layers")
        input_size = config.int("hidden_size_per_layer_input")
        input_vocab = config.int("vocab_size_per_layer_input")
        eps = config.float("rms_norm_eps")
        attention_bias = config.flag("attention_bias")
        softcap = config.float("final_logit_softcapping", default=0)
        tied = config.flag("tie_word_embeddings")
        sliding_rope = config.rope("rope_parameters.sliding_attention", types=("default",), head_dim=head_dim)
        full_rope = config.rope("rope_parameters.full_attention", types=("proportional",), head_dim=full_head_dim)
        if kv_heads < 1 or heads % kv_heads:
            raise ConfigError(f"attention.sliding gets {heads} heads, no multiple of its {kv_heads} kv_heads")
        kinds = config.schedule(layers, (
            schedule.everywhere("sliding"),
            schedule.every(6, "full"),
            schedule.by(config.optional("layer_types"), {"sliding_attention": "sliding", "full_attention": "full"}),
            schedule.last(1, "full"),
            schedule.last(shared_layers, {"sliding": "sliding_shared", "full": "full_shared"}),
        ))
        config.finish()
        return cls(
            vocab, hidden, layers, heads, kv_heads, head_dim, full_head_dim, window, size, wide_size, shared_layers,
            input_size, input_vocab, eps, attention_bias, softcap, tied, sliding_rope, full_rope, kinds,
        )


# state: what each entry keeps between steps
MIXERS: dict[str, tuple[str, ...]] = {
    "sliding": ("sliding",),
    "full": ("full",),
    "sliding_shared": ("sliding_shared",),
    "full_shared": ("full_shared",),
}


def state(d: Dims) -> dict[str, State]:
    """What a layer of each entry keeps."""
    return {
        "sliding": Pages(d.kv_heads, d.head_dim, window=d.window),
        "full": Pages(d.kv_heads, d.full_head_dim),
        "sliding_shared": SharedPages("sliding"),
        "full_shared": SharedPages("full"),
    }


def routes(d: Dims) -> dict[str, dict[str, int]]:
    """How many experts each token of a layer is sent to, by kind and by where its router leaves them on request."""
    return {}


# weights: role, shape, and the tensors of the checkpoint that fill it
def model_weights(d: Dims) -> list[Weight]:
    # spec: embedding, head
    return [
        Weight("embed_tokens", (d.vocab, d.hidden), (Part("embed_tokens.weight", d.vocab),)),
        Weight("per_layer_model_projection", (d.layers * d.input_size, d.hidden), (
            Part("per_layer_model_projection.weight", d.layers * d.input_size),
        )),
        Weight("per_layer_projection_norm", (d.input_size,), (Part("per_layer_projection_norm.weight", d.input_size),)),
        Weight("embed_tokens_per_layer", (d.input_vocab, d.layers * d.input_size), (
            Part("embed_tokens_per_layer.weight", d.input_vocab),
        )),
        Weight("norm", (d.hidden,), (Part("norm.weight", d.hidden),)),
        Weight("lm_head", (d.vocab, d.hidden), (Part("lm_head.weight", d.vocab),), same_as="embed_tokens" if d.tied else None),
    ]


def block_weights(d: Dims) -> list[Weight]:
    # spec: block
    return [
        Weight("input_layernorm", (d.hidden,), (Part("layers.*.input_layernorm.weight", d.hidden),)),
        Weight("post_attention_layernorm", (d.hidden,), (Part("layers.*.post_attention_layernorm.weight", d.hidden),)),
        Weight("pre_feedforward_layernorm", (d.hidden,), (Part("layers.*.pre_feedforward_layernorm.weight", d.hidden),)),
        Weight("post_feedforward_layernorm", (d.hidden,), (Part("layers.*.post_feedforward_layernorm.weight", d.hidden),)),
        Weight("per_layer_input_gate", (d.input_size, d.hidden), (Part("layers.*.per_layer_input_gate.weight", d.input_size),)),
        Weight("per_layer_projection", (d.hidden, d.input_size), (Part("layers.*.per_layer_projection.weight", d.hidden),)),
        Weight("post_per_layer_input_norm", (d.hidden,), (Part("layers.*.post_per_layer_input_norm.weight", d.hidden),)),
        Weight("layer_scalar", (1,), (Part("layers.*.layer_scalar", 1),)),
    ]


def sliding_weights(d: Dims) -> list[Weight]:
    # spec: attention.sliding
    return [
        Weight("qkv", (d.heads * d.head_dim + d.kv_heads * d.head_dim + d.kv_heads * d.head_dim, d.hidden), (
            Part("layers.*.self_attn.q_proj.weight", d.heads * d.head_dim),
            Part("layers.*.self_attn.k_proj.weight", d.kv_heads * d.head_dim),
            Part("layers.*.self_attn.v_proj.weight", d.kv_heads * d.head_dim),
        )),
        Weight("qkv_bias", (d.heads * d.head_dim + d.kv_heads * d.head_dim + d.kv_heads * d.head_dim,), (
            Part("layers.*.self_attn.q_proj.bias", d.heads * d.head_dim),
            Part("layers.*.self_attn.k_proj.bias", d.kv_heads * d.head_dim),
            Part("layers.*.self_attn.v_proj.bias", d.kv_heads * d.head_dim),
        ), present=d.attention_bias),
        Weight("o", (d.hidden, d.heads * d.head_dim), (Part("layers.*.self_attn.o_proj.weight", d.hidden),)),
        Weight("o_bias", (d.hidden,), (Part("layers.*.self_attn.o_proj.bias", d.hidden),), present=d.attention_bias),
        Weight("q_norm", (d.head_dim,), (Part("layers.*.self_attn.q_norm.weight", d.head_dim),)),
        Weight("k_norm", (d.head_dim,), (Part("layers.*.self_attn.k_norm.weight", d.head_dim),)),
    ]


def full_weights(d: Dims) -> list[Weight]:
    # spec: attention.full
    return [
        Weight("qkv", (d.heads * d.full_head_dim + d.kv_heads * d.full_head_dim + d.kv_heads * d.full_head_dim, d.hidden), (
            Part("layers.*.self_attn.q_proj.weight", d.heads * d.full_head_dim),
            Part("layers.*.self_attn.k_proj.weight", d.kv_heads * d.full_head_dim),
            Part("layers.*.self_attn.v_proj.weight", d.kv_heads * d.full_head_dim),
        )),
        Weight("qkv_bias", (d.heads * d.full_head_dim + d.kv_heads * d.full_head_dim + d.kv_heads * d.full_head_dim,), (
            Part("layers.*.self_attn.q_proj.bias", d.heads * d.full_head_dim),
            Part("layers.*.self_attn.k_proj.bias", d.kv_heads * d.full_head_dim),
            Part("layers.*.self_attn.v_proj.bias", d.kv_heads * d.full_head_dim),
        ), present=d.attention_bias),
        Weight("o", (d.hidden, d.heads * d.full_head_dim), (Part("layers.*.self_attn.o_proj.weight", d.hidden),)),
        Weight("o_bias", (d.hidden,), (Part("layers.*.self_attn.o_proj.bias", d.hidden),), present=d.attention_bias),
        Weight("q_norm", (d.full_head_dim,), (Part("layers.*.self_attn.q_norm.weight", d.full_head_dim),)),
        Weight("k_norm", (d.full_head_dim,), (Part("layers.*.self_attn.k_norm.weight", d.full_head_dim),)),
    ]


def sliding_shared_weights(d: Dims) -> list[Weight]:
    # spec: attention.sliding_shared
    return [
        Weight("q", (d.heads * d.head_dim, d.hidden), (Part("layers.*.self_attn.q_proj.weight", d.heads * d.head_dim),)),
        Weight("q_bias", (d.heads * d.head_dim,), (
            Part("layers.*.self_attn.q_proj.bias", d.heads * d.head_dim),
        ), present=d.attention_bias),
        Weight("o", (d.hidden, d.heads * d.head_dim), (Part("layers.*.self_attn.o_proj.weight", d.hidden),)),
        Weight("o_bias", (d.hidden,), (Part("layers.*.self_attn.o_proj.bias", d.hidden),), present=d.attention_bias),
        Weight("q_norm", (d.head_dim,), (Part("layers.*.self_attn.q_norm.weight", d.head_dim),)),
    ]


def full_shared_weights(d: Dims) -> list[Weight]:
    # spec: attention.full_shared
    return [
        Weight("q", (d.heads * d.full_head_dim, d.hidden), (
            Part("layers.*.self_attn.q_proj.weight", d.heads * d.full_head_dim),
        )),
        Weight("q_bias", (d.heads * d.full_head_dim,), (
            Part("layers.*.self_attn.q_proj.bias", d.heads * d.full_head_dim),
        ), present=d.attention_bias),
        Weight("o", (d.hidden, d.heads * d.full_head_dim), (Part("layers.*.self_attn.o_proj.weight", d.hidden),)),
        Weight("o_bias", (d.hidden,), (Part("layers.*.self_attn.o_proj.bias", d.hidden),), present=d.attention_bias),
        Weight("q_norm", (d.full_head_dim,), (Part("layers.*.self_attn.q_norm.weight", d.full_head_dim),)),
    ]


def mlp_weights(d: Dims) -> list[Weight]:
    # spec: mlp.mlp
    return [
        Weight("mlp_gate_up", (2 * d.size, d.hidden), (
            Part("layers.*.mlp.gate_proj.weight", d.size),
            Part("layers.*.mlp.up_proj.weight", d.size),
        )),
        Weight("mlp_down", (d.hidden, d.size), (Part("layers.*.mlp.down_proj.weight", d.hidden),)),
    ]


def wide_weights(d: Dims) -> list[Weight]:
    # spec: mlp.wide
    return [
        Weight("wide_gate_up", (2 * d.wide_size, d.hidden), (
            Part("layers.*.mlp.gate_proj.weight", d.wide_size),
            Part("layers.*.mlp.up_proj.weight", d.wide_size),
        )),
        Weight("wide_down", (d.hidden, d.wide_size), (Part("layers.*.mlp.down_proj.weight", d.hidden),)),
    ]


WEIGHTS: dict[str, tuple[Callable[[Dims], list[Weight]], ...]] = {
    "model": (model_weights,),
    "sliding": (block_weights, sliding_weights, mlp_weights),
    "full": (block_weights, full_weights, mlp_weights),
    "sliding_shared": (block_weights, sliding_shared_weights, wide_weights),
    "full_shared": (block_weights, full_shared_weights, wide_weights),
}
HEAD = "lm_head"


def mlp(w: Layer, x_TD: Tensor) -> Tensor:
    # spec: mlp.mlp
    gate_TI, up_TI = project(x_TD, w.mlp_gate_up).chunk(2, dim=-1)
    return project(F.gelu(gate_TI, approximate="tanh") * up_TI, w.mlp_down)


def wide(w: Layer, x_TD: Tensor) -> Tensor:
    # spec: mlp.wide
    gate_TI, up_TI = project(x_TD, w.wide_gate_up).chunk(2, dim=-1)
    return project(F.gelu(gate_TI, approximate="tanh") * up_TI, w.wide_down)


def sliding_layer(w: Layer, x_TD: Tensor, per_layer_TI: Tensor, dims: Dims, step: Step) -> Tensor:
    # spec: block[0]
    h_TD = rms_norm(x_TD, w.input_layernorm, dims.eps)
    h_TD = sliding_attention(w, h_TD, dims, step)  # writes K/V pages
    x_TD = x_TD + rms_norm(h_TD, w.post_attention_layernorm, dims.eps)
    # spec: block[1]
    h_TD = rms_norm(x_TD, w.pre_feedforward_layernorm, dims.eps)
    h_TD = mlp(w, h_TD)
    x_TD = x_TD + rms_norm(h_TD, w.post_feedforward_layernorm, dims.eps)
    # spec: block[2]
    h_TI = project(x_TD, w.per_layer_input_gate)
    h_TI = F.gelu(h_TI, approximate="tanh") * per_layer_TI
    h_TD = project(h_TI, w.per_layer_projection)
    x_TD = x_TD + rms_norm(h_TD, w.post_per_layer_input_norm, dims.eps)
    # spec: block[3]
    return x_TD * w.layer_scalar  # multiplies the whole stream, not the branch


def full_layer(w: Layer, x_TD: Tensor, per_layer_TI: Tensor, dims: Dims, step: Step) -> Tensor:
    # spec: block[0]
    h_TD = rms_norm(x_TD, w.input_layernorm, dims.eps)
    h_TD = full_attention(w, h_TD, dims, step)  # writes K/V pages
    x_TD = x_TD + rms_norm(h_TD, w.post_attention_layernorm, dims.eps)
    # spec: block[1]
    h_TD = rms_norm(x_TD, w.pre_feedforward_layernorm, dims.eps)
    h_TD = mlp(w, h_TD)
    x_TD = x_TD + rms_norm(h_TD, w.post_feedforward_layernorm, dims.eps)
    # spec: block[2]
    h_TI = project(x_TD, w.per_layer_input_gate)
    h_TI = F.gelu(h_TI, approximate="tanh") * per_layer_TI
    h_TD = project(h_TI, w.per_layer_projection)
    x_TD = x_TD + rms_norm(h_TD, w.post_per_layer_input_norm, dims.eps)
    # spec: block[3]
    return x_TD * w.layer_scalar  # multiplies the whole stream, not the branch


def sliding_shared_layer(w: Layer, x_TD: Tensor, per_layer_TI: Tensor, dims: Dims, step: Step) -> Tensor:
    # spec: block[0]
    h_TD = rms_norm(x_TD, w.input_layernorm, dims.eps)
    h_TD = sliding_shared_attention(w, h_TD, dims, step)  # reads the K/V pages of an earlier layer
    x_TD = x_TD + rms_norm(h_TD, w.post_attention_layernorm, dims.eps)
    # spec: block[1]
    h_TD = rms_norm(x_TD, w.pre_feedforward_layernorm, dims.eps)
    h_TD = wide(w, h_TD)
    x_TD = x_TD + rms_norm(h_TD, w.post_feedforward_layernorm, dims.eps)
    # spec: block[2]
    h_TI = project(x_TD, w.per_layer_input_gate)
    h_TI = F.gelu(h_TI, approximate="tanh") * per_layer_TI
    h_TD = project(h_TI, w.per_layer_projection)
    x_TD = x_TD + rms_norm(h_TD, w.post_per_layer_input_norm, dims.eps)
    # spec: block[3]
    return x_TD * w.layer_scalar  # multiplies the whole stream, not the branch


def full_shared_layer(w: Layer, x_TD: Tensor, per_layer_TI: Tensor, dims: Dims, step: Step) -> Tensor:
    # spec: block[0]
    h_TD = rms_norm(x_TD, w.input_layernorm, dims.eps)
    h_TD = full_shared_attention(w, h_TD, dims, step)  # reads the K/V pages of an earlier layer
    x_TD = x_TD + rms_norm(h_TD, w.post_attention_layernorm, dims.eps)
    # spec: block[1]
    h_TD = rms_norm(x_TD, w.pre_feedforward_layernorm, dims.eps)
    h_TD = wide(w, h_TD)
    x_TD = x_TD + rms_norm(h_TD, w.post_feedforward_layernorm, dims.eps)
    # spec: block[2]
    h_TI = project(x_TD, w.per_layer_input_gate)
    h_TI = F.gelu(h_TI, approximate="tanh") * per_layer_TI
    h_TD = project(h_TI, w.per_layer_projection)
    x_TD = x_TD + rms_norm(h_TD, w.post_per_layer_input_norm, dims.eps)
    # spec: block[3]
    return x_TD * w.layer_scalar  # multiplies the whole stream, not the branch


LAYERS: dict[str, Callable[..., Tensor]] = {
    "sliding": sliding_layer,
    "full": full_layer,
    "sliding_shared": sliding_shared_layer,
    "full_shared": full_shared_layer,
}


class Walker:
    """The model: embedding, the schedule's layers, head. `run` holds one function a layer, of LAYERS or compiled."""

    def __init__(self, dims: Dims, weights: Layer, layers: list[Layer], run: list[Callable[..., Tensor]]) -> None:
        self.dims = dims
        self.weights = weights
        self.layers = layers
        self.run = run

    def forward(self, ids_T: Tensor, step: Step) -> Tensor:
        """Token ids (T,) to hidden states (T, D) after the final norm; writes K/V pages and state."""
        w, dims = self.weights, self.dims
        x_TD = F.embedding(ids_T, w.embed_tokens) * rounded(math.sqrt(dims.hidden), w.embed_tokens.dtype)
        # spec: layer_inputs.per_layer
        per_layer_model_projection_TLI = project(x_TD, w.per_layer_model_projection).unflatten(-1, (dims.layers, dims.input_size))
        per_layer_model_projection_TLI = per_layer_model_projection_TLI * (1 / math.sqrt(dims.hidden))
        per_layer_model_projection_TLI = rms_norm(per_layer_model_projection_TLI, w.per_layer_projection_norm, dims.eps)
        embed_tokens_per_layer_TLI = F.embedding(ids_T, w.embed_tokens_per_layer).unflatten(-1, (dims.layers, dims.input_size))
        embed_tokens_per_layer_TLI = embed_tokens_per_layer_TLI * rounded(math.sqrt(dims.input_size), w.embed_tokens_per_layer.dtype)
        per_layer_TLI = per_layer_model_projection_TLI + embed_tokens_per_layer_TLI
        per_layer_TLI = per_layer_TLI * (1 / math.sqrt(2))
        for layer, run, *inputs in zip(self.layers, self.run, per_layer_TLI.unbind(1)):
            x_TD = run(layer, x_TD, *inputs, dims, step)
        return rms_norm(x_TD, w.norm, dims.eps)

    def logits(self, x_RD: Tensor) -> Tensor:
        """Hidden states (R, D) to logits (R, V)."""
        w, dims = self.weights, self.dims
        return softcap(project(x_RD, w.lm_head), dims.softcap)
