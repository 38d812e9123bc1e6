# Generated from specs/mimo_v2_flash.yaml. Do not edit: change the spec or the templates,
# then run `flexgen build specs/mimo_v2_flash.yaml`.
"""MiMo V2 Flash: windows with sinks and twice the key/value heads, narrow scaled values, grouped sigmoid routing.

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
from flexgen.contract.heads import check_groups, check_heads, check_widths
from flexgen.contract.numbers import Numbers
from flexgen.runtime.loading.config import Config
from flexgen.runtime.ops.elementwise import embed, project, rms_norm_cast_before
from flexgen.runtime.ops.experts import experts, keep_groups, renormalise, top_k

from .attention import full_attention, full_weights, sliding_attention, sliding_weights

ABI = 3
MODEL_TYPES = ("mimo_v2_flash",)
TEXT_CONFIG = None
PREFIXES = ("model",)
SKIP = ("mtp.*",)
DEFAULTS = {
    "rms_norm_eps": 1e-5, "attention_bias": False, "tie_word_embeddings": False, "hidden_act": "silu", "n_group": 1,
    "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True, "attention_value_scale": 0.707,
    "rope_parameters": {
        "full_attention": {"rope_theta": 5000000.0, "partial_rotary_factor": 0.334},
        "sliding_attention": {"rope_theta": 10000.0, "partial_rotary_factor": 0.334},
    },
}
REQUIRE = {"hidden_act": "silu"}
IGNORE = ()


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
        self.value_dim = config.int("v_head_dim")
        self.value_scale = config.float("attention_value_scale", default=1.0)
        self.window = config.int("sliding_window")
        self.size = config.int("intermediate_size")
        self.experts = config.int("n_routed_experts")
        self.top_k = config.int("num_experts_per_tok")
        self.expert_size = config.int("moe_intermediate_size")
        self.groups = config.int("n_group")
        self.kept_groups = config.int("topk_group")
        self.renormalise = config.flag("norm_topk_prob")
        self.routed_scale = config.float("routed_scaling_factor")
        self.eps = config.float("rms_norm_eps")
        self.attention_bias = config.flag("attention_bias")
        self.tied = config.flag("tie_word_embeddings")
        self.full_rope = config.rope("rope_parameters.full_attention", types=("default", "linear", "yarn"), head_dim=self.head_dim)
        self.sliding_rope = config.rope("rope_parameters.sliding_attention", types=("default", "linear", "yarn"), head_dim=self.head_dim)
        check_heads("attention.full", heads=self.heads, kv_heads=self.kv_heads)
        check_heads("attention.sliding", heads=self.heads, kv_heads=2 * self.kv_heads)
        check_widths("attention.full", head_dim=self.head_dim, value_dim=self.value_dim)
        check_widths("attention.sliding", head_dim=self.head_dim, value_dim=self.value_dim)
        check_groups("moe.moe", experts=self.experts, groups=self.groups, keep=self.kept_groups, best=2, top_k=self.top_k)
        self.kinds = config.crossed(self.layers, {
            "attention": (
                schedule.by(config.optional("layer_types"), {"full_attention": "full", "sliding_attention": "sliding"}),
            ),
            "feed_forward": (
                schedule.by(config.optional("mlp_layer_types"), {"dense": "dense", "sparse": "sparse"}),
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
        *weights.linear("mlp_gate_up", {"mlp.gate_proj": dims.size, "mlp.up_proj": dims.size}, dims.hidden,
            out="inner"),
        *weights.linear("mlp_down", {"mlp.down_proj": dims.hidden}, dims.size, into="inner"),
    ]


def mlp(w: Layer, x_TD: Tensor) -> Tensor:
    # spec: mlp.mlp
    gate_TI, up_TI = project(x_TD, w.mlp_gate_up).chunk(2, dim=-1)
    return project(F.silu(gate_TI) * up_TI, w.mlp_down)


def moe_weights(dims: Dims) -> list[weights.Weight]:
    # spec: moe.moe
    return [
        *weights.router("moe_router", {"mlp.gate": dims.experts}, dims.hidden, "moe_routed", dims.top_k, fp32=True),
        weights.bias("moe_choice_bias",
            (dims.experts,), "mlp.gate.e_score_correction_bias", axes=("experts",), fp32=True),
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
    scores_TE = project(x_TD.float(), w.moe_router.float())
    scores_TE = torch.sigmoid(scores_TE)
    choice_TE = scores_TE + w.moe_choice_bias
    choice_TE = keep_groups(choice_TE, dims.groups, dims.kept_groups, best=2)
    _, experts_TK = top_k(choice_TE, dims.top_k, w.moe_routed)
    weights_TK = scores_TE.gather(1, experts_TK)
    weights_TK = renormalise(weights_TK, dims.renormalise, eps=1e-20)
    weights_TK = weights_TK * dims.routed_scale
    return weights_TK.float(), experts_TK


def moe_experts(w: Layer, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, dims: Dims) -> Tensor:
    # spec: moe.moe
    return experts(x_TD, weights_TK, experts_TK, w.moe_gate_up, w.moe_down, act="silu", layout="out_in")


def mlp_block(w: Layer, x_TD: Tensor, dims: Dims, step: Step, attention: Callable[..., Tensor]) -> Tensor:
    # spec: block[0]
    h_TD = rms_norm_cast_before(x_TD, w.input_layernorm, dims.eps)
    h_TD = attention(w, h_TD, dims, step)  # writes K/V pages
    x_TD = x_TD + h_TD
    # spec: block[1]
    h_TD = rms_norm_cast_before(x_TD, w.post_attention_layernorm, dims.eps)
    h_TD = mlp(w, h_TD)
    return x_TD + h_TD


def moe_block(w: Layer, x_TD: Tensor, dims: Dims, step: Step, attention: Callable[..., Tensor]) -> Tensor:
    # spec: block[0]
    h_TD = rms_norm_cast_before(x_TD, w.input_layernorm, dims.eps)
    h_TD = attention(w, h_TD, dims, step)  # writes K/V pages
    x_TD = x_TD + h_TD
    # spec: block[1]
    h_TD = rms_norm_cast_before(x_TD, w.post_attention_layernorm, dims.eps)
    routes = moe_route(w, h_TD, dims)
    h_TD = moe_experts(w, h_TD, *routes, dims)
    return x_TD + h_TD


def full_dense_layer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    return mlp_block(w, x_TD, dims, step, full_attention)


def full_sparse_layer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    return moe_block(w, x_TD, dims, step, full_attention)


def sliding_dense_layer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    return mlp_block(w, x_TD, dims, step, sliding_attention)


def sliding_sparse_layer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    return moe_block(w, x_TD, dims, step, sliding_attention)


# by kind: the layer function, the entries that keep state, and the tables of weights; a layer's tensors are below LAYER
LAYERS: dict[str, Callable[..., Tensor]] = {
    "full_dense": full_dense_layer, "full_sparse": full_sparse_layer, "sliding_dense": sliding_dense_layer,
    "sliding_sparse": sliding_sparse_layer,
}
MIXERS: dict[str, tuple[str, ...]] = {
    "full_dense": ("full",), "full_sparse": ("full",), "sliding_dense": ("sliding",), "sliding_sparse": ("sliding",),
}
WEIGHTS: dict[str, tuple[Callable[[Dims], list[weights.Weight]], ...]] = {
    "model": (model_weights,),
    "full_dense": (block_weights, full_weights, mlp_weights),
    "full_sparse": (block_weights, full_weights, moe_weights),
    "sliding_dense": (block_weights, sliding_weights, mlp_weights),
    "sliding_sparse": (block_weights, sliding_weights, moe_weights),
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
