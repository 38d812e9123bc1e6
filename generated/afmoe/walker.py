# Generated from specs/afmoe.yaml. Do not edit: change the spec or the templates,
# then run `flexgen build specs/afmoe.yaml`.
"""AFMoE (Trinity): gated attention, windows with rope and full layers without, sandwich norms, biased sigmoid routing.

T tokens of one step   D model width   I inner width   E experts   V vocabulary   R rows that want logits
w the layer's weights, pages and state   dims the checkpoint's numbers
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen.contract import layer_kinds as schedule, weights
from flexgen.contract.abi import Layer, Step
from flexgen.contract.heads import check_heads
from flexgen.contract.numbers import Numbers
from flexgen.runtime.loading.config import Config
from flexgen.runtime.ops.elementwise import embed, project, rms_norm
from flexgen.runtime.ops.experts import experts, renormalise, top_k

from .attention import full_attention, full_weights, sliding_attention, sliding_weights

ABI = 3
MODEL_TYPES = ("afmoe",)
TEXT_CONFIG = None
PREFIXES = ("model",)
SKIP = ()
DEFAULTS = {
    "rms_norm_eps": 1e-5, "attention_bias": False, "tie_word_embeddings": False, "hidden_act": "silu", "head_dim": 128,
    "num_dense_layers": 1, "num_experts": 64, "num_experts_per_tok": 6, "num_shared_experts": 2, "route_scale": 1.0,
    "sliding_window": 1024, "mup_enabled": False, "rope_parameters": {"rope_theta": 10000.0},
}
REQUIRE = {"hidden_act": "silu"}
IGNORE = ("global_attn_every_n_layers",)


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
        self.kv_heads = config.int("num_key_value_heads", default=self.heads)
        self.head_dim = config.int("head_dim")
        self.window = config.int("sliding_window")
        self.size = config.int("intermediate_size")
        self.dense_layers = config.int("num_dense_layers")
        self.experts = config.int("num_experts")
        self.top_k = config.int("num_experts_per_tok")
        self.expert_size = config.int("moe_intermediate_size")
        self.shared_size = self.expert_size * config.number("num_shared_experts")
        self.routed_scale = config.float("route_scale")
        self.embedding_factor = 1 + config.number("mup_enabled") * (math.sqrt(self.hidden) - 1)
        self.eps = config.float("rms_norm_eps")
        self.bias = config.flag("attention_bias")
        self.tied = config.flag("tie_word_embeddings")
        self.rope = config.rope("rope_parameters", types=("default", "linear", "llama3", "yarn"), head_dim=self.head_dim)
        check_heads("attention.sliding", heads=self.heads, kv_heads=self.kv_heads)
        self.kinds = config.crossed(self.layers, {
            "attention": (
                schedule.by(config.optional("layer_types"), {"sliding_attention": "sliding", "full_attention": "full"}),
            ),
            "feed_forward": (
                schedule.everywhere("sparse"),
                schedule.first(self.dense_layers, "dense"),
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
        weights.norm("pre_mlp_layernorm", dims.hidden),
        weights.norm("post_mlp_layernorm", dims.hidden),
    ]


def mlp_weights(dims: Dims) -> list[weights.Weight]:
    # spec: mlp.mlp
    return [
        *weights.linear("mlp_gate_up", {"mlp.gate_proj": dims.size, "mlp.up_proj": dims.size}, dims.hidden,
            out="inner"),
        *weights.linear("mlp_down", {"mlp.down_proj": dims.hidden}, dims.size, into="inner"),
    ]


def mlp(w: Layer, x_TD: Tensor) -> Tensor:
    # spec: mlp.mlp
    gate_TI, up_TI = project(x_TD, w.mlp_gate_up).chunk(2, dim=-1)
    return project(F.silu(gate_TI) * up_TI, w.mlp_down)


def shared_weights(dims: Dims) -> list[weights.Weight]:
    # spec: mlp.shared
    return [
        *weights.linear("shared_gate_up", {
            "mlp.shared_experts.gate_proj": dims.shared_size,
            "mlp.shared_experts.up_proj": dims.shared_size,
        }, dims.hidden, out="inner"),
        *weights.linear("shared_down", {"mlp.shared_experts.down_proj": dims.hidden}, dims.shared_size, into="inner"),
    ]


def shared(w: Layer, x_TD: Tensor) -> Tensor:
    # spec: mlp.shared
    gate_TI, up_TI = project(x_TD, w.shared_gate_up).chunk(2, dim=-1)
    return project(F.silu(gate_TI) * up_TI, w.shared_down)


def moe_weights(dims: Dims) -> list[weights.Weight]:
    # spec: moe.moe
    return [
        *weights.router("moe_router", {"mlp.router.gate": dims.experts}, dims.hidden, "moe_routed", dims.top_k),
        weights.bias("moe_choice_bias", (dims.experts,), "mlp.expert_bias", axes=("experts",), fp32=True),
        weights.experts("moe_gate_up",
            dims.experts, ("inner", 2 * dims.expert_size), ("", dims.hidden),
            weights.Stacked("mlp.experts.gate_up_proj"),
            weights.PerExpert(("mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"))),
        weights.experts("moe_down",
            dims.experts, ("", dims.hidden), ("inner", dims.expert_size), weights.Stacked("mlp.experts.down_proj"),
            weights.PerExpert(("mlp.experts.*.down_proj.weight",))),
    ]


def moe_route(w: Layer, x_TD: Tensor, dims: Dims) -> tuple[Tensor, Tensor]:
    # spec: moe.moe.router
    scores_TE = project(x_TD, w.moe_router)
    scores_TE = torch.sigmoid(scores_TE.float())
    choice_TE = scores_TE + w.moe_choice_bias
    _, experts_TK = top_k(choice_TE, dims.top_k, w.moe_routed)
    weights_TK = scores_TE.gather(1, experts_TK)
    weights_TK = renormalise(weights_TK, True, eps=1e-20)
    weights_TK = weights_TK * dims.routed_scale
    return weights_TK.float(), experts_TK


def moe_experts(w: Layer, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, dims: Dims) -> Tensor:
    # spec: moe.moe
    return experts(x_TD, weights_TK, experts_TK, w.moe_gate_up, w.moe_down, act="silu", layout="out_in")


def shared_moe_block(w: Layer, x_TD: Tensor, dims: Dims, step: Step, attention: Callable[..., Tensor]) -> Tensor:
    # spec: block[0]
    h_TD = rms_norm(x_TD, w.input_layernorm, dims.eps)
    h_TD = attention(w, h_TD, dims, step)  # writes K/V pages
    x_TD = x_TD + rms_norm(h_TD, w.post_attention_layernorm, dims.eps)
    # spec: block[1]
    h_TD = rms_norm(x_TD, w.pre_mlp_layernorm, dims.eps)
    shared_TD = shared(w, h_TD)
    routes = moe_route(w, h_TD, dims)
    moe_TD = moe_experts(w, h_TD, *routes, dims)
    h_TD = shared_TD + moe_TD
    return x_TD + rms_norm(h_TD, w.post_mlp_layernorm, dims.eps)


def mlp_block(w: Layer, x_TD: Tensor, dims: Dims, step: Step, attention: Callable[..., Tensor]) -> Tensor:
    # spec: block[0]
    h_TD = rms_norm(x_TD, w.input_layernorm, dims.eps)
    h_TD = attention(w, h_TD, dims, step)  # writes K/V pages
    x_TD = x_TD + rms_norm(h_TD, w.post_attention_layernorm, dims.eps)
    # spec: block[1]
    h_TD = rms_norm(x_TD, w.pre_mlp_layernorm, dims.eps)
    h_TD = mlp(w, h_TD)
    return x_TD + rms_norm(h_TD, w.post_mlp_layernorm, dims.eps)


def sliding_sparse_layer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    return shared_moe_block(w, x_TD, dims, step, sliding_attention)


def sliding_dense_layer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    return mlp_block(w, x_TD, dims, step, sliding_attention)


def full_sparse_layer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    return shared_moe_block(w, x_TD, dims, step, full_attention)


def full_dense_layer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    return mlp_block(w, x_TD, dims, step, full_attention)


# by kind: the layer function, the entries that keep state, and the tables of weights; a layer's tensors are below LAYER
LAYERS: dict[str, Callable[..., Tensor]] = {
    "sliding_sparse": sliding_sparse_layer, "sliding_dense": sliding_dense_layer, "full_sparse": full_sparse_layer,
    "full_dense": full_dense_layer,
}
MIXERS: dict[str, tuple[str, ...]] = {
    "sliding_sparse": ("sliding",), "sliding_dense": ("sliding",), "full_sparse": ("full",), "full_dense": ("full",),
}
WEIGHTS: dict[str, tuple[Callable[[Dims], list[weights.Weight]], ...]] = {
    "model": (model_weights,),
    "sliding_sparse": (block_weights, sliding_weights, shared_weights, moe_weights),
    "sliding_dense": (block_weights, sliding_weights, mlp_weights),
    "full_sparse": (block_weights, full_weights, shared_weights, moe_weights),
    "full_dense": (block_weights, full_weights, mlp_weights),
}
LAYER = "layers.*"


class Walker:
    """The model: embedding, the schedule's layers, head. `run` holds one function a layer, of LAYERS or compiled."""

    def __init__(self, dims: Dims, weights: Layer, layers: list[Layer], run: list[Callable[..., Tensor]]) -> None:
        self.dims, self.weights, self.layers, self.run = dims, weights, layers, run

    def forward(self, ids_T: Tensor, step: Step) -> Tensor:
        """Token ids (T,) to hidden states (T, D) after the final norm; writes K/V pages and state."""
        w, dims = self.weights, self.dims
        x_TD = embed(ids_T, w.embed_tokens) * dims.embedding_factor
        for layer, run in zip(self.layers, self.run):
            x_TD = run(layer, x_TD, dims, step)
        return rms_norm(x_TD, w.norm, dims.eps)

    def logits(self, x_RD: Tensor) -> Tensor:
        """Hidden states (R, D) to logits (R, V)."""
        w = self.weights
        return project(x_RD, w.lm_head)
