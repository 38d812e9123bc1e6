# Generated from specs/gpt_oss.yaml. Do not edit: change the spec or the templates,
# then run `flexgen build specs/gpt_oss.yaml`.
"""gpt-oss: sink logits, alternating windows, routed experts with biases and a clamped activation.

T tokens of one step   D model width   I inner width   E experts   V vocabulary   R rows that want logits
w the layer's weights, pages and state   dims the checkpoint's numbers
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flexgen.contract import layer_kinds as schedule, weights
from flexgen.contract.abi import Layer, Step
from flexgen.contract.heads import check_heads
from flexgen.contract.numbers import Numbers
from flexgen.runtime.loading.config import Config
from flexgen.runtime.ops.elementwise import embed, project, rms_norm
from flexgen.runtime.ops.experts import experts, top_k

from .attention import full_attention, full_weights, sliding_attention, sliding_weights

ABI = 3
MODEL_TYPES = ("gpt_oss",)
TEXT_CONFIG = None
PREFIXES = ("model",)
SKIP = ()
DEFAULTS = {
    "rms_norm_eps": 1e-5, "attention_bias": True, "tie_word_embeddings": False, "hidden_act": "silu",
    "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "sliding_window": 128, "rope_parameters": {"rope_theta": 150000.0},
}
REQUIRE = {"hidden_act": "silu", "attention_bias": True}
IGNORE = ("initial_context_length", "experts_per_token", "quantization_config")


class Dims(Numbers):
    """The numbers of one checkpoint."""

    def __init__(self, raw: dict, ignore: tuple[str, ...] = ()) -> None:
        """Bind the numbers to a config.json. Raises ConfigError for whatever this package does not describe."""
        config = Config(raw, model_types=MODEL_TYPES, defaults=DEFAULTS, require=REQUIRE,
                        ignore=(*IGNORE, *ignore), layers_by="layer_types")
        self.vocab = config.int("vocab_size")
        self.hidden = config.int("hidden_size")
        self.layers = config.int("num_hidden_layers")
        self.heads = config.int("num_attention_heads")
        self.kv_heads = config.int("num_key_value_heads")
        self.head_dim = config.int("head_dim")
        self.window = config.int("sliding_window")
        self.experts = config.int("num_local_experts", "num_experts")
        self.top_k = config.int("num_experts_per_tok")
        self.expert_size = config.int("intermediate_size")
        self.alpha = config.float("swiglu_alpha")
        self.limit = config.float("swiglu_limit")
        self.eps = config.float("rms_norm_eps")
        self.tied = config.flag("tie_word_embeddings")
        self.rope = config.rope("rope_parameters", types=("yarn",), head_dim=self.head_dim)
        check_heads("attention.full", heads=self.heads, kv_heads=self.kv_heads)
        self.kinds = config.schedule(self.layers, (
            schedule.pattern(("sliding", "full")),
            schedule.by(config.optional("layer_types"), {"sliding_attention": "sliding", "full_attention": "full"}),
        ))
        config.finish()


def model_weights(dims: Dims) -> list[weights.Weight]:
    # spec: embedding, head
    return [
        weights.embedding("embed_tokens", dims.vocab, dims.hidden),
        weights.norm("norm", dims.hidden),
        weights.head("lm_head", dims.vocab, dims.hidden, same_as="embed_tokens" if dims.tied else None),
    ]


def block_weights(dims: Dims) -> list[weights.Weight]:
    # spec: block
    return [
        weights.norm("input_layernorm", dims.hidden),
        weights.norm("post_attention_layernorm", dims.hidden),
    ]


def moe_weights(dims: Dims) -> list[weights.Weight]:
    # spec: moe.moe
    return [
        *weights.router("moe_router", {"mlp.router": dims.experts}, dims.hidden, "moe_routed", dims.top_k, bias=True),
        weights.experts("moe_gate_up",
            dims.experts, ("inner", 2 * dims.expert_size), ("", dims.hidden),
            weights.Stacked("mlp.experts.gate_up_proj"), weights.Mxfp4("mlp.experts.gate_up_proj"), transposed=True),
        weights.bias("moe_gate_up_bias",
            (dims.experts, 2 * dims.expert_size), "mlp.experts.gate_up_proj_bias", axes=("experts", "inner")),
        weights.experts("moe_down",
            dims.experts, ("", dims.hidden), ("inner", dims.expert_size), weights.Stacked("mlp.experts.down_proj"),
            weights.Mxfp4("mlp.experts.down_proj"), transposed=True),
        weights.bias("moe_down_bias", (dims.experts, dims.hidden), "mlp.experts.down_proj_bias", axes=("experts", "")),
    ]


def moe_route(w: Layer, x_TD: Tensor, dims: Dims) -> tuple[Tensor, Tensor]:
    # spec: moe.moe.router
    # softmax over the chosen experts only
    scores_TE = project(x_TD, w.moe_router, w.moe_router_bias)
    weights_TK, experts_TK = top_k(scores_TE, dims.top_k, w.moe_routed)
    weights_TK = torch.softmax(weights_TK, dim=-1)
    return weights_TK.to(x_TD.dtype), experts_TK


def moe_experts(w: Layer, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, dims: Dims) -> Tensor:
    # spec: moe.moe
    return experts(
        x_TD, weights_TK, experts_TK, w.moe_gate_up, w.moe_down, act="silu", layout="in_out", interleaved=True,
        gate_up_bias=w.moe_gate_up_bias, down_bias=w.moe_down_bias, alpha=dims.alpha, limit=dims.limit, up_offset=1,
    )


def block(w: Layer, x_TD: Tensor, dims: Dims, step: Step, attention: Callable[..., Tensor]) -> Tensor:
    # spec: block[0]
    h_TD = rms_norm(x_TD, w.input_layernorm, dims.eps)
    h_TD = attention(w, h_TD, dims, step)  # writes K/V pages
    x_TD = x_TD + h_TD
    # spec: block[1]
    h_TD = rms_norm(x_TD, w.post_attention_layernorm, dims.eps)
    routes = moe_route(w, h_TD, dims)
    h_TD = moe_experts(w, h_TD, *routes, dims)
    return x_TD + h_TD


def sliding_layer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    return block(w, x_TD, dims, step, sliding_attention)


def full_layer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    return block(w, x_TD, dims, step, full_attention)


# by kind: the layer function, the entries that keep state, and the tables of weights; a layer's tensors are below LAYER
LAYERS: dict[str, Callable[..., Tensor]] = {"sliding": sliding_layer, "full": full_layer}
MIXERS: dict[str, tuple[str, ...]] = {"sliding": ("sliding",), "full": ("full",)}
WEIGHTS: dict[str, tuple[Callable[[Dims], list[weights.Weight]], ...]] = {
    "model": (model_weights,),
    "sliding": (block_weights, sliding_weights, moe_weights),
    "full": (block_weights, full_weights, moe_weights),
}
LAYER = "layers.*"


class Walker:
    """The model: embedding, the schedule's layers, head. `run` holds one function a layer, of LAYERS or compiled."""

    def __init__(self, dims: Dims, weights: Layer, layers: list[Layer], run: list[Callable[..., Tensor]]) -> None:
        self.dims, self.weights, self.layers, self.run = dims, weights, layers, run

    def forward(self, ids_T: Tensor, step: Step) -> Tensor:
        """Token ids (T,) to hidden states (T, D) after the final norm; writes K/V pages and state."""
        w, dims = self.weights, self.dims
        x_TD = embed(ids_T, w.embed_tokens)
        for layer, run in zip(self.layers, self.run):
            x_TD = run(layer, x_TD, dims, step)
        return rms_norm(x_TD, w.norm, dims.eps)

    def logits(self, x_RD: Tensor) -> Tensor:
        """Hidden states (R, D) to logits (R, V)."""
        w = self.weights
        return project(x_RD, w.lm_head)
