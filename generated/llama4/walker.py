# Generated from specs/llama4.yaml. Do not edit: change the spec or the templates,
# then run `flexgen build specs/llama4.yaml`.
"""Llama 4's text model: chunked layers with rope, full ones without, experts weighted where they read.

T tokens of one step   D model width   I inner width   E experts   V vocabulary   R rows that want logits
w the layer's weights, pages and state   dims the checkpoint's numbers
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen.contract import layer_kinds as schedule, weights
from flexgen.contract.abi import Layer, Step
from flexgen.contract.heads import check_heads
from flexgen.contract.numbers import Numbers
from flexgen.runtime.loading.config import Config
from flexgen.runtime.ops.elementwise import embed, project, rms_norm_cast_before
from flexgen.runtime.ops.experts import experts, top_k

from .attention import (
    normed_attention, normed_weights, still_attention,
    still_weights, turning_attention, turning_weights,
)

ABI = 3
MODEL_TYPES = ("llama4_text", "llama4")
TEXT_CONFIG = "text_config"
PREFIXES = ("model", "language_model.model")
SKIP = ("vision_model.*", "multi_modal_projector.*")
DEFAULTS = {
    "rms_norm_eps": 1e-5, "attention_bias": False, "tie_word_embeddings": False, "hidden_act": "silu",
    "use_qk_norm": True, "attn_temperature_tuning": True, "attn_scale": 0.1, "floor_scale": 8192,
    "attention_chunk_size": 8192, "no_rope_layer_interval": 4, "interleave_moe_layer_step": 1,
    "rope_parameters": {"rope_theta": 500000.0},
}
REQUIRE = {"hidden_act": "silu", "attn_temperature_tuning": True}
IGNORE = ("layer_types",)


class Dims(Numbers):
    """The numbers of one checkpoint."""

    def __init__(self, raw: dict, ignore: tuple[str, ...] = ()) -> None:
        """Bind the numbers to a config.json. Raises ConfigError for whatever this package does not describe."""
        config = Config(raw, model_types=MODEL_TYPES, defaults=DEFAULTS, require=REQUIRE,
                        ignore=(*IGNORE, *ignore), layers_by="no_rope_layers")
        self.vocab = config.int("vocab_size")
        self.hidden = config.int("hidden_size")
        self.layers = config.int("num_hidden_layers")
        self.heads = config.int("num_attention_heads", nonzero=True)
        self.kv_heads = config.int("num_key_value_heads", default=self.heads)
        self.head_dim = config.int("head_dim", default=self.hidden // self.heads)
        self.chunk = config.int_or_none("attention_chunk_size")
        self.tuning = config.float("attn_scale")
        self.tuning_length = config.int("floor_scale")
        self.size = config.int("intermediate_size_mlp")
        self.experts = config.int("num_local_experts")
        self.top_k = config.int("num_experts_per_tok")
        self.expert_size = config.int("intermediate_size")
        self.eps = config.float("rms_norm_eps")
        self.attention_bias = config.flag("attention_bias")
        self.tied = config.flag("tie_word_embeddings")
        self.rope = config.rope("rope_parameters", types=("default", "llama3"), head_dim=self.head_dim)
        check_heads("attention.turning", heads=self.heads, kv_heads=self.kv_heads)
        self.kinds = config.crossed(self.layers, {
            "attention": (
                schedule.everywhere("turning"),
                schedule.every(config.optional("no_rope_layer_interval"), "still"),
                schedule.by(config.optional("no_rope_layers"), {"0": "still", "1": "turning"}),
                schedule.everywhere({"turning": "normed"}, when=config.optional("use_qk_norm")),
            ),
            "feed_forward": (
                schedule.everywhere("dense"),
                schedule.every(config.optional("interleave_moe_layer_step"), "sparse"),
                schedule.at(config.optional("moe_layers"), "sparse"),
            ),
        })
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


def mlp_weights(dims: Dims) -> list[weights.Weight]:
    # spec: mlp.mlp
    return [
        *weights.linear("mlp_gate_up", {
            "feed_forward.gate_proj": dims.size,
            "feed_forward.up_proj": dims.size,
        }, dims.hidden, out="inner"),
        *weights.linear("mlp_down", {"feed_forward.down_proj": dims.hidden}, dims.size, into="inner"),
    ]


def mlp(w: Layer, x_TD: Tensor) -> Tensor:
    # spec: mlp.mlp
    gate_TI, up_TI = project(x_TD, w.mlp_gate_up).chunk(2, dim=-1)
    return project(F.silu(gate_TI) * up_TI, w.mlp_down)


def shared_weights(dims: Dims) -> list[weights.Weight]:
    # spec: mlp.shared
    return [
        *weights.linear("shared_gate_up", {
            "feed_forward.shared_expert.gate_proj": dims.expert_size,
            "feed_forward.shared_expert.up_proj": dims.expert_size,
        }, dims.hidden, out="inner"),
        *weights.linear("shared_down", {"feed_forward.shared_expert.down_proj": dims.hidden}, dims.expert_size,
            into="inner"),
    ]


def shared(w: Layer, x_TD: Tensor) -> Tensor:
    # spec: mlp.shared
    gate_TI, up_TI = project(x_TD, w.shared_gate_up).chunk(2, dim=-1)
    return project(F.silu(gate_TI) * up_TI, w.shared_down)


def moe_weights(dims: Dims) -> list[weights.Weight]:
    # spec: moe.moe
    return [
        *weights.router("moe_router", {"feed_forward.router": dims.experts}, dims.hidden, "moe_routed", dims.top_k),
        weights.experts("moe_gate_up",
            dims.experts, ("inner", 2 * dims.expert_size), ("", dims.hidden),
            weights.Stacked("feed_forward.experts.gate_up_proj"), transposed=True),
        weights.experts("moe_down",
            dims.experts, ("", dims.hidden), ("inner", dims.expert_size),
            weights.Stacked("feed_forward.experts.down_proj"), transposed=True),
    ]


def moe_route(w: Layer, x_TD: Tensor, dims: Dims) -> tuple[Tensor, Tensor]:
    # spec: moe.moe.router
    scores_TE = project(x_TD, w.moe_router)
    weights_TK, experts_TK = top_k(scores_TE, dims.top_k, w.moe_routed)
    weights_TK = torch.sigmoid(weights_TK.float())
    return weights_TK.to(x_TD.dtype), experts_TK


def moe_experts(w: Layer, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, dims: Dims) -> Tensor:
    # spec: moe.moe
    return experts(
        x_TD, weights_TK, experts_TK, w.moe_gate_up, w.moe_down, act="silu", layout="in_out", weights_on="input",
    )


def shared_moe_block(w: Layer, x_TD: Tensor, dims: Dims, step: Step, attention: Callable[..., Tensor]) -> Tensor:
    # spec: block[0]
    h_TD = rms_norm_cast_before(x_TD, w.input_layernorm, dims.eps)
    h_TD = attention(w, h_TD, dims, step)  # writes K/V pages
    x_TD = x_TD + h_TD
    # spec: block[1]
    h_TD = rms_norm_cast_before(x_TD, w.post_attention_layernorm, dims.eps)
    shared_TD = shared(w, h_TD)
    routes = moe_route(w, h_TD, dims)
    moe_TD = moe_experts(w, h_TD, *routes, dims)
    h_TD = shared_TD + moe_TD
    return x_TD + h_TD


def mlp_block(w: Layer, x_TD: Tensor, dims: Dims, step: Step, attention: Callable[..., Tensor]) -> Tensor:
    # spec: block[0]
    h_TD = rms_norm_cast_before(x_TD, w.input_layernorm, dims.eps)
    h_TD = attention(w, h_TD, dims, step)  # writes K/V pages
    x_TD = x_TD + h_TD
    # spec: block[1]
    h_TD = rms_norm_cast_before(x_TD, w.post_attention_layernorm, dims.eps)
    h_TD = mlp(w, h_TD)
    return x_TD + h_TD


def turning_sparse_layer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    return shared_moe_block(w, x_TD, dims, step, turning_attention)


def turning_dense_layer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    return mlp_block(w, x_TD, dims, step, turning_attention)


def normed_sparse_layer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    return shared_moe_block(w, x_TD, dims, step, normed_attention)


def normed_dense_layer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    return mlp_block(w, x_TD, dims, step, normed_attention)


def still_sparse_layer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    return shared_moe_block(w, x_TD, dims, step, still_attention)


def still_dense_layer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    return mlp_block(w, x_TD, dims, step, still_attention)


# by kind: the layer function, the entries that keep state, and the tables of weights; a layer's tensors are below LAYER
LAYERS: dict[str, Callable[..., Tensor]] = {
    "turning_sparse": turning_sparse_layer, "turning_dense": turning_dense_layer, "normed_sparse": normed_sparse_layer,
    "normed_dense": normed_dense_layer, "still_sparse": still_sparse_layer, "still_dense": still_dense_layer,
}
MIXERS: dict[str, tuple[str, ...]] = {
    "turning_sparse": ("turning",), "turning_dense": ("turning",), "normed_sparse": ("normed",),
    "normed_dense": ("normed",), "still_sparse": ("still",), "still_dense": ("still",),
}
WEIGHTS: dict[str, tuple[Callable[[Dims], list[weights.Weight]], ...]] = {
    "model": (model_weights,),
    "turning_sparse": (block_weights, turning_weights, shared_weights, moe_weights),
    "turning_dense": (block_weights, turning_weights, mlp_weights),
    "normed_sparse": (block_weights, normed_weights, shared_weights, moe_weights),
    "normed_dense": (block_weights, normed_weights, mlp_weights),
    "still_sparse": (block_weights, still_weights, shared_weights, moe_weights),
    "still_dense": (block_weights, still_weights, mlp_weights),
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
        return rms_norm_cast_before(x_TD, w.norm, dims.eps)

    def logits(self, x_RD: Tensor) -> Tensor:
        """Hidden states (R, D) to logits (R, V)."""
        w = self.weights
        return project(x_RD, w.lm_head)
