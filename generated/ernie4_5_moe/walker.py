# Generated from specs/ernie4_5_moe.yaml. Do not edit: change the spec or the templates,
# then run `flexgen build specs/ernie4_5_moe.yaml`.
"""ERNIE 4.5 with routed experts chosen by biased scores, shared experts, dense first layers.

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
from flexgen.runtime.ops.experts import experts, renormalise, top_k

from .attention import attention_attention, attention_weights

ABI = 3
MODEL_TYPES = ("ernie4_5_moe",)
TEXT_CONFIG = None
PREFIXES = ("model",)
SKIP = (
    "layers.*.self_attn.rotary_emb.inv_freq", "mtp_block.*", "mtp_emb_norm.*", "mtp_hidden_norm.*", "mtp_linear_proj.*",
)
DEFAULTS = {
    "rms_norm_eps": 1e-5, "use_bias": False, "tie_word_embeddings": True, "hidden_act": "silu", "moe_k": 6,
    "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1,
    "moe_layer_interval": 1, "moe_norm_min": 1e-12, "rope_parameters": {"rope_theta": 500000.0},
}
REQUIRE = {"hidden_act": "silu"}
IGNORE = ()


class Dims(Numbers):
    """The numbers of one checkpoint."""

    def __init__(self, raw: dict, ignore: tuple[str, ...] = ()) -> None:
        """Bind the numbers to a config.json. Raises ConfigError for whatever this package does not describe."""
        config = Config(raw, model_types=MODEL_TYPES, defaults=DEFAULTS, require=REQUIRE,
                        ignore=(*IGNORE, *ignore), layers_by=None)
        self.vocab = config.int("vocab_size")
        self.hidden = config.int("hidden_size")
        self.layers = config.int("num_hidden_layers", nonzero=True)
        self.heads = config.int("num_attention_heads", nonzero=True)
        self.kv_heads = config.int("num_key_value_heads", default=self.heads)
        self.head_dim = config.int("head_dim", default=self.hidden // self.heads)
        self.size = config.int("intermediate_size")
        self.experts = config.int("moe_num_experts")
        self.top_k = config.int("moe_k")
        self.expert_size = config.int("moe_intermediate_size")
        self.shared_size = self.expert_size * config.number("moe_num_shared_experts")
        self.end = config.number("moe_layer_end_index") + self.layers
        self.last_sparse = self.end - self.end // self.layers * self.layers
        self.norm_floor = config.float("moe_norm_min")
        self.eps = config.float("rms_norm_eps")
        self.bias = config.flag("use_bias")
        self.tied = config.flag("tie_word_embeddings")
        self.rope = config.rope("rope_parameters", types=("default", "linear", "llama3", "yarn"), head_dim=self.head_dim)
        check_heads("attention.attention", heads=self.heads, kv_heads=self.kv_heads)
        self.kinds = config.schedule(self.layers, (
            schedule.everywhere("dense"),
            schedule.every(config.optional("moe_layer_interval"), "routed"),
            schedule.everywhere({"routed": "both"}, when=config.optional("moe_num_shared_experts")),
            schedule.first(config.optional("moe_layer_start_index"), "dense"),
            schedule.since(self.last_sparse + 1, "dense"),
        ))
        config.finish()


def model_weights(dims: Dims) -> list[weights.Weight]:
    # spec: embedding, head
    return [
        weights.embedding("embed_tokens", dims.vocab, dims.hidden),
        weights.norm("norm", dims.hidden),
        weights.head("lm_head", dims.vocab, dims.hidden, same_as="embed_tokens" if dims.tied else None),
        weights.bias("lm_head_bias", (dims.vocab,), "lm_head.bias", axes=("vocab",), present=dims.bias),
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
            out="inner", bias=dims.bias),
        *weights.linear("mlp_down", {"mlp.down_proj": dims.hidden}, dims.size, into="inner", bias=dims.bias),
    ]


def mlp(w: Layer, x_TD: Tensor) -> Tensor:
    # spec: mlp.mlp
    gate_TI, up_TI = project(x_TD, w.mlp_gate_up, w.mlp_gate_up_bias).chunk(2, dim=-1)
    return project(F.silu(gate_TI) * up_TI, w.mlp_down, w.mlp_down_bias)


def shared_weights(dims: Dims) -> list[weights.Weight]:
    # spec: mlp.shared
    return [
        *weights.linear("shared_gate_up", {
            "mlp.shared_experts.gate_proj": dims.shared_size,
            "mlp.shared_experts.up_proj": dims.shared_size,
        }, dims.hidden, out="inner", bias=dims.bias),
        *weights.linear("shared_down", {"mlp.shared_experts.down_proj": dims.hidden}, dims.shared_size,
            into="inner", bias=dims.bias),
    ]


def shared(w: Layer, x_TD: Tensor) -> Tensor:
    # spec: mlp.shared
    gate_TI, up_TI = project(x_TD, w.shared_gate_up, w.shared_gate_up_bias).chunk(2, dim=-1)
    return project(F.silu(gate_TI) * up_TI, w.shared_down, w.shared_down_bias)


def moe_weights(dims: Dims) -> list[weights.Weight]:
    # spec: moe.moe
    return [
        *weights.router("moe_router", {"mlp.gate": dims.experts}, dims.hidden, "moe_routed", dims.top_k, fp32=True),
        weights.bias("moe_choice_bias",
            (1, dims.experts), "mlp.moe_statics.e_score_correction_bias", axes=("", "experts"), fp32=True),
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
    scores_TE = torch.softmax(scores_TE, dim=-1, dtype=torch.float32)
    choice_TE = scores_TE + w.moe_choice_bias
    _, experts_TK = top_k(choice_TE, dims.top_k, w.moe_routed)
    weights_TK = scores_TE.gather(1, experts_TK)
    weights_TK = renormalise(weights_TK, True, floor=dims.norm_floor)
    return weights_TK.to(x_TD.dtype), experts_TK


def moe_experts(w: Layer, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, dims: Dims) -> Tensor:
    # spec: moe.moe
    return experts(x_TD, weights_TK, experts_TK, w.moe_gate_up, w.moe_down, act="silu", layout="out_in")


def routed_layer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    # spec: block[0]
    h_TD = rms_norm_cast_before(x_TD, w.input_layernorm, dims.eps)
    h_TD = attention_attention(w, h_TD, dims, step)  # writes K/V pages
    x_TD = x_TD + h_TD
    # spec: block[1]
    h_TD = rms_norm_cast_before(x_TD, w.post_attention_layernorm, dims.eps)
    routes = moe_route(w, h_TD, dims)
    h_TD = moe_experts(w, h_TD, *routes, dims)
    return x_TD + h_TD


def both_layer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    # spec: block[0]
    h_TD = rms_norm_cast_before(x_TD, w.input_layernorm, dims.eps)
    h_TD = attention_attention(w, h_TD, dims, step)  # writes K/V pages
    x_TD = x_TD + h_TD
    # spec: block[1]
    h_TD = rms_norm_cast_before(x_TD, w.post_attention_layernorm, dims.eps)
    routes = moe_route(w, h_TD, dims)
    moe_TD = moe_experts(w, h_TD, *routes, dims)
    shared_TD = shared(w, h_TD)
    h_TD = moe_TD + shared_TD
    return x_TD + h_TD


def dense_layer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    # spec: block[0]
    h_TD = rms_norm_cast_before(x_TD, w.input_layernorm, dims.eps)
    h_TD = attention_attention(w, h_TD, dims, step)  # writes K/V pages
    x_TD = x_TD + h_TD
    # spec: block[1]
    h_TD = rms_norm_cast_before(x_TD, w.post_attention_layernorm, dims.eps)
    h_TD = mlp(w, h_TD)
    return x_TD + h_TD


# by kind: the layer function, the entries that keep state, and the tables of weights; a layer's tensors are below LAYER
LAYERS: dict[str, Callable[..., Tensor]] = {"routed": routed_layer, "both": both_layer, "dense": dense_layer}
MIXERS: dict[str, tuple[str, ...]] = {
    "routed": ("attention",), "both": ("attention",), "dense": ("attention",),
}
WEIGHTS: dict[str, tuple[Callable[[Dims], list[weights.Weight]], ...]] = {
    "model": (model_weights,),
    "routed": (block_weights, attention_weights, moe_weights),
    "both": (block_weights, attention_weights, moe_weights, shared_weights),
    "dense": (block_weights, attention_weights, mlp_weights),
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
        return project(x_RD, w.lm_head, w.lm_head_bias)
