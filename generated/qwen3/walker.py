# Generated from specs/qwen3.yaml. Do not edit: change the spec or the templates,
# then run `flexgen build specs/qwen3.yaml`.
"""Qwen3 dense: a Llama with norms on queries and keys, and optional sliding layers.

T tokens of one step   D model width   I inner width   E experts   V vocabulary   R rows that want logits
w the layer's weights, pages and state   d, dims the checkpoint's numbers
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from flexgen.contract import layer_kinds as schedule
from flexgen.contract.abi import Layer, Pages, Part, State, Step, Weight
from flexgen.runtime.loading.config import Config
from flexgen.errors import ConfigError
from flexgen.runtime.ops.elementwise import project, rms_norm_cast_before
from flexgen.runtime.loading.rope import Rope

from .attention import full_attention, sliding_attention

ABI = 2
# checkpoint
MODEL_TYPES = ("qwen3",)
TEXT_CONFIG = None
PREFIXES = ("model",)
SKIP = ("layers.*.self_attn.rotary_emb.inv_freq",)
DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "head_dim": 128,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "max_window_layers": 28,
    "rope_parameters": {"rope_theta": 10000.0},
}
REQUIRE = {"hidden_act": "silu"}
IGNORE = ()


@dataclass(frozen=True)
class Dims:
    """The numbers of one checkpoint."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int
    size: int
    eps: float
    attention_bias: bool
    tied: bool
    rope: Rope
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
        kv_heads = config.int("num_key_value_heads", default=heads)
        head_dim = config.int("head_dim")
        window = config.int("sliding_window", default=0)
        size = config.int("intermediate_size")
        eps = config.float("rms_norm_eps")
        attention_bias = config.flag("attention_bias")
        tied = config.flag("tie_word_embeddings")
        rope = config.rope("rope_parameters", types=("default", "linear", "llama3", "yarn"), head_dim=head_dim)
        if kv_heads < 1 or heads % kv_heads:
            raise ConfigError(f"attention.full gets {heads} heads, no multiple of its {kv_heads} kv_heads")
        kinds = config.schedule(layers, (
            schedule.everywhere("full"),
            schedule.since(config.optional("max_window_layers"), "sliding", when=config.optional("use_sliding_window")),
            schedule.by(config.optional("layer_types"), {"full_attention": "full", "sliding_attention": "sliding"}),
        ))
        config.finish()
        return cls(
            vocab, hidden, layers, heads, kv_heads, head_dim, window, size, eps, attention_bias, tied, rope, kinds,
        )


# state: what each entry keeps between steps
MIXERS: dict[str, tuple[str, ...]] = {
    "full": ("full",),
    "sliding": ("sliding",),
}


def state(d: Dims) -> dict[str, State]:
    """What a layer of each entry keeps."""
    return {
        "full": Pages(d.kv_heads, d.head_dim),
        "sliding": Pages(d.kv_heads, d.head_dim, window=d.window),
    }


def routes(d: Dims) -> dict[str, dict[str, int]]:
    """How many experts each token of a layer is sent to, by kind and by where its router leaves them on request."""
    return {}


# weights: role, shape, and the tensors of the checkpoint that fill it
def model_weights(d: Dims) -> list[Weight]:
    # spec: embedding, head
    return [
        Weight("embed_tokens", (d.vocab, d.hidden), (Part("embed_tokens.weight", d.vocab),)),
        Weight("norm", (d.hidden,), (Part("norm.weight", d.hidden),)),
        Weight("lm_head", (d.vocab, d.hidden), (Part("lm_head.weight", d.vocab),), same_as="embed_tokens" if d.tied else None),
    ]


def block_weights(d: Dims) -> list[Weight]:
    # spec: block
    return [
        Weight("input_layernorm", (d.hidden,), (Part("layers.*.input_layernorm.weight", d.hidden),)),
        Weight("post_attention_layernorm", (d.hidden,), (Part("layers.*.post_attention_layernorm.weight", d.hidden),)),
    ]


def full_weights(d: Dims) -> list[Weight]:
    # spec: attention.full
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


def mlp_weights(d: Dims) -> list[Weight]:
    # spec: mlp.mlp
    return [
        Weight("mlp_gate_up", (2 * d.size, d.hidden), (
            Part("layers.*.mlp.gate_proj.weight", d.size),
            Part("layers.*.mlp.up_proj.weight", d.size),
        )),
        Weight("mlp_down", (d.hidden, d.size), (Part("layers.*.mlp.down_proj.weight", d.hidden),)),
    ]


WEIGHTS: dict[str, tuple[Callable[[Dims], list[Weight]], ...]] = {
    "model": (model_weights,),
    "full": (block_weights, full_weights, mlp_weights),
    "sliding": (block_weights, sliding_weights, mlp_weights),
}
HEAD = "lm_head"


def mlp(w: Layer, x_TD: Tensor) -> Tensor:
    # spec: mlp.mlp
    gate_TI, up_TI = project(x_TD, w.mlp_gate_up).chunk(2, dim=-1)
    return project(F.silu(gate_TI) * up_TI, w.mlp_down)


def full_layer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    # spec: block[0]
    h_TD = rms_norm_cast_before(x_TD, w.input_layernorm, dims.eps)
    h_TD = full_attention(w, h_TD, dims, step)  # writes K/V pages
    x_TD = x_TD + h_TD
    # spec: block[1]
    h_TD = rms_norm_cast_before(x_TD, w.post_attention_layernorm, dims.eps)
    h_TD = mlp(w, h_TD)
    x_TD = x_TD + h_TD
    return x_TD


def sliding_layer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    # spec: block[0]
    h_TD = rms_norm_cast_before(x_TD, w.input_layernorm, dims.eps)
    h_TD = sliding_attention(w, h_TD, dims, step)  # writes K/V pages
    x_TD = x_TD + h_TD
    # spec: block[1]
    h_TD = rms_norm_cast_before(x_TD, w.post_attention_layernorm, dims.eps)
    h_TD = mlp(w, h_TD)
    x_TD = x_TD + h_TD
    return x_TD


LAYERS: dict[str, Callable[..., Tensor]] = {
    "full": full_layer,
    "sliding": sliding_layer,
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
        x_TD = F.embedding(ids_T, w.embed_tokens)
        for layer, run in zip(self.layers, self.run):
            x_TD = run(layer, x_TD, dims, step)
        return rms_norm_cast_before(x_TD, w.norm, dims.eps)

    def logits(self, x_RD: Tensor) -> Tensor:
        """Hidden states (R, D) to logits (R, V)."""
        w = self.weights
        return project(x_RD, w.lm_head)
