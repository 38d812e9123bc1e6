# Generated from specs/gpt_oss.yaml. Do not edit: change the spec or the templates,
# then run `flexgen build specs/gpt_oss.yaml`.
"""gpt-oss: sink logits, alternating windows, routed experts with biases and a clamped activation.

T tokens of one step   D model width   I inner width   E experts   V vocabulary   R rows that want logits
w the layer's weights, pages and state   d, dims the checkpoint's numbers
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen.contract import layer_kinds as schedule
from flexgen.contract.abi import Layer, Mxfp4, Pages, Part, Stacked, State, Step, Weight
from flexgen.runtime.loading.config import Config
from flexgen.errors import ConfigError
from flexgen.runtime.ops.experts import experts, top_k
from flexgen.runtime.ops.elementwise import project, rms_norm
from flexgen.runtime.loading.rope import Rope

from .attention import full_attention, sliding_attention

ABI = 2
# checkpoint
MODEL_TYPES = ("gpt_oss",)
TEXT_CONFIG = None
PREFIXES = ("model",)
SKIP = ()
DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "sliding_window": 128,
    "rope_parameters": {"rope_theta": 150000.0},
}
REQUIRE = {"hidden_act": "silu", "attention_bias": True}
IGNORE = ("initial_context_length", "experts_per_token", "quantization_config")


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
    experts: int
    top_k: int
    expert_size: int
    alpha: float
    limit: float
    eps: float
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
        kv_heads = config.int("num_key_value_heads")
        head_dim = config.int("head_dim")
        window = config.int("sliding_window")
        experts = config.int("num_local_experts", "num_experts")
        top_k = config.int("num_experts_per_tok")
        expert_size = config.int("intermediate_size")
        alpha = config.float("swiglu_alpha")
        limit = config.float("swiglu_limit")
        eps = config.float("rms_norm_eps")
        tied = config.flag("tie_word_embeddings")
        rope = config.rope("rope_parameters", types=("yarn",), head_dim=head_dim)
        if kv_heads < 1 or heads % kv_heads:
            raise ConfigError(f"attention.full gets {heads} heads, no multiple of its {kv_heads} kv_heads")
        kinds = config.schedule(layers, (
            schedule.pattern(("sliding", "full")),
            schedule.by(config.optional("layer_types"), {"sliding_attention": "sliding", "full_attention": "full"}),
        ))
        config.finish()
        return cls(
            vocab, hidden, layers, heads, kv_heads, head_dim, window, experts, top_k, expert_size, alpha, limit, eps,
            tied, rope, kinds,
        )


# state: what each entry keeps between steps
MIXERS: dict[str, tuple[str, ...]] = {
    "sliding": ("sliding",),
    "full": ("full",),
}


def state(d: Dims) -> dict[str, State]:
    """What a layer of each entry keeps."""
    return {
        "full": Pages(d.kv_heads, d.head_dim),
        "sliding": Pages(d.kv_heads, d.head_dim, window=d.window),
    }


def routes(d: Dims) -> dict[str, dict[str, int]]:
    """How many experts each token of a layer is sent to, by kind and by where its router leaves them on request."""
    return {
        "sliding": {"moe_routed": d.top_k},
        "full": {"moe_routed": d.top_k},
    }


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
        )),
        Weight("o", (d.hidden, d.heads * d.head_dim), (Part("layers.*.self_attn.o_proj.weight", d.hidden),)),
        Weight("o_bias", (d.hidden,), (Part("layers.*.self_attn.o_proj.bias", d.hidden),)),
        Weight("sinks", (d.heads,), (Part("layers.*.self_attn.sinks", d.heads),)),
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
        )),
        Weight("o", (d.hidden, d.heads * d.head_dim), (Part("layers.*.self_attn.o_proj.weight", d.hidden),)),
        Weight("o_bias", (d.hidden,), (Part("layers.*.self_attn.o_proj.bias", d.hidden),)),
        Weight("sinks", (d.heads,), (Part("layers.*.self_attn.sinks", d.heads),)),
    ]


def moe_weights(d: Dims) -> list[Weight]:
    # spec: moe.moe
    return [
        Weight("moe_router", (d.experts, d.hidden), (Part("layers.*.mlp.router.weight", d.experts),)),
        Weight("moe_router_bias", (d.experts,), (Part("layers.*.mlp.router.bias", d.experts),)),
        Weight("moe_gate_up", (d.experts, d.hidden, 2 * d.expert_size), layouts=(
            Stacked("layers.*.mlp.experts.gate_up_proj"),
            Mxfp4("layers.*.mlp.experts.gate_up_proj"),
        )),
        Weight("moe_gate_up_bias", (d.experts, 2 * d.expert_size), (Part("layers.*.mlp.experts.gate_up_proj_bias", d.experts),)),
        Weight("moe_down", (d.experts, d.expert_size, d.hidden), layouts=(
            Stacked("layers.*.mlp.experts.down_proj"),
            Mxfp4("layers.*.mlp.experts.down_proj"),
        )),
        Weight("moe_down_bias", (d.experts, d.hidden), (Part("layers.*.mlp.experts.down_proj_bias", d.experts),)),
    ]


WEIGHTS: dict[str, tuple[Callable[[Dims], list[Weight]], ...]] = {
    "model": (model_weights,),
    "sliding": (block_weights, sliding_weights, moe_weights),
    "full": (block_weights, full_weights, moe_weights),
}
HEAD = "lm_head"


def moe_route(w: Layer, x_TD: Tensor, dims: Dims) -> tuple[Tensor, Tensor]:
    # spec: moe.moe.router
    scores_TE = project(x_TD, w.moe_router, w.moe_router_bias)
    weights_TK, experts_TK = top_k(scores_TE, dims.top_k, w.moe_routed)
    weights_TK = torch.softmax(weights_TK, dim=-1)  # softmax over the chosen experts only
    return weights_TK.to(x_TD.dtype), experts_TK


def moe_experts(w: Layer, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, dims: Dims) -> Tensor:
    # spec: moe.moe
    return experts(
        x_TD,
        weights_TK,
        experts_TK,
        w.moe_gate_up,
        w.moe_down,
        act="silu",
        layout="in_out",
        interleaved=True,
        gate_up_bias=w.moe_gate_up_bias,
        down_bias=w.moe_down_bias,
        alpha=dims.alpha,
        limit=dims.limit,
        up_offset=1,
    )


def sliding_layer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    # spec: block[0]
    h_TD = rms_norm(x_TD, w.input_layernorm, dims.eps)
    h_TD = sliding_attention(w, h_TD, dims, step)  # writes K/V pages
    x_TD = x_TD + h_TD
    # spec: block[1]
    h_TD = rms_norm(x_TD, w.post_attention_layernorm, dims.eps)
    routes = moe_route(w, h_TD, dims)  # softmax over the chosen experts only
    h_TD = moe_experts(w, h_TD, *routes, dims)
    x_TD = x_TD + h_TD
    return x_TD


def full_layer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    # spec: block[0]
    h_TD = rms_norm(x_TD, w.input_layernorm, dims.eps)
    h_TD = full_attention(w, h_TD, dims, step)  # the reference takes the softmax, sink included, in the model's dtype
    x_TD = x_TD + h_TD
    # spec: block[1]
    h_TD = rms_norm(x_TD, w.post_attention_layernorm, dims.eps)
    routes = moe_route(w, h_TD, dims)  # softmax over the chosen experts only
    h_TD = moe_experts(w, h_TD, *routes, dims)
    x_TD = x_TD + h_TD
    return x_TD


LAYERS: dict[str, Callable[..., Tensor]] = {
    "sliding": sliding_layer,
    "full": full_layer,
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
        return rms_norm(x_TD, w.norm, dims.eps)

    def logits(self, x_RD: Tensor) -> Tensor:
        """Hidden states (R, D) to logits (R, V)."""
        w = self.weights
        return project(x_RD, w.lm_head)
