# Generated from specs/phimoe.yaml. Do not edit: change the spec or the templates,
# then run `flexgen build specs/phimoe.yaml`.
"""Phi 3.5 MoE: two experts by sparsemixer in every layer, layer norms, biases throughout.

T tokens of one step   D model width   I inner width   E experts   V vocabulary   R rows that want logits
w the layer's weights, pages and state   dims the checkpoint's numbers
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from flexgen.contract import layer_kinds as schedule, weights
from flexgen.contract.abi import Layer, Step
from flexgen.contract.heads import check_heads
from flexgen.contract.numbers import Numbers
from flexgen.runtime.loading.config import Config
from flexgen.runtime.ops.elementwise import embed, layer_norm, project
from flexgen.runtime.ops.experts import experts, sparsemixer, top_k

from .attention import attention_attention, attention_weights

ABI = 3
MODEL_TYPES = ("phimoe",)
TEXT_CONFIG = None
PREFIXES = ("model",)
SKIP = ("layers.*.self_attn.rotary_emb.inv_freq",)
DEFAULTS = {
    "rms_norm_eps": 1e-5, "attention_bias": False, "lm_head_bias": False, "tie_word_embeddings": False,
    "hidden_act": "silu", "num_local_experts": 16, "num_experts_per_tok": 2, "router_jitter_noise": 0.01,
    "rope_parameters": {"rope_theta": 1000000.0},
}
REQUIRE = {"hidden_act": "silu"}
IGNORE = ("input_jitter_noise",)


class Dims(Numbers):
    """The numbers of one checkpoint."""

    def __init__(self, raw: dict, ignore: tuple[str, ...] = ()) -> None:
        """Bind the numbers to a config.json. Raises ConfigError for whatever this package does not describe."""
        config = Config(raw, model_types=MODEL_TYPES, defaults=DEFAULTS, require=REQUIRE,
                        ignore=(*IGNORE, *ignore), layers_by=None)
        self.vocab = config.int("vocab_size")
        self.hidden = config.int("hidden_size")
        self.layers = config.int("num_hidden_layers")
        self.heads = config.int("num_attention_heads", nonzero=True)
        self.kv_heads = config.int("num_key_value_heads")
        self.head_dim = config.int("head_dim", default=self.hidden // self.heads)
        self.window = config.int_or_none("sliding_window")
        self.experts = config.int("num_local_experts")
        self.top_k = config.int("num_experts_per_tok")
        self.size = config.int("intermediate_size")
        self.jitter = config.float("router_jitter_noise")
        self.eps = config.float("rms_norm_eps")
        self.attention_bias = config.flag("attention_bias")
        self.head_bias = config.flag("lm_head_bias")
        self.tied = config.flag("tie_word_embeddings")
        self.rope = config.rope("rope_parameters", types=("default", "longrope"), head_dim=self.head_dim)  # transformers: no long factors
        check_heads("attention.attention", heads=self.heads, kv_heads=self.kv_heads)
        self.kinds = config.schedule(self.layers, (schedule.everywhere("layer"),))
        config.finish()


def model_weights(dims: Dims) -> list[weights.Weight]:
    # spec: embedding, head
    return [
        weights.embedding("embed_tokens", dims.vocab, dims.hidden),
        weights.norm("norm", dims.hidden),
        weights.bias("norm_bias", (dims.hidden,), "norm.bias", axes=("",)),
        weights.head("lm_head", dims.vocab, dims.hidden, same_as="embed_tokens" if dims.tied else None),
        weights.bias("lm_head_bias", (dims.vocab,), "lm_head.bias", axes=("vocab",), present=dims.head_bias),
    ]


def block_weights(dims: Dims) -> list[weights.Weight]:
    # spec: block
    return [
        weights.norm("input_layernorm", dims.hidden),
        weights.bias("input_layernorm_bias", (dims.hidden,), "input_layernorm.bias", axes=("",)),
        weights.norm("post_attention_layernorm", dims.hidden),
        weights.bias("post_attention_layernorm_bias", (dims.hidden,), "post_attention_layernorm.bias", axes=("",)),
    ]


def moe_weights(dims: Dims) -> list[weights.Weight]:
    # spec: moe.moe
    return [
        *weights.router("moe_router", {"block_sparse_moe.gate": dims.experts}, dims.hidden, "moe_routed", dims.top_k),
        weights.experts("moe_gate_up",
            dims.experts, ("inner", 2 * dims.size), ("", dims.hidden), weights.Stacked("mlp.experts.gate_up_proj"),
            weights.PerExpert(("block_sparse_moe.experts.*.w1.weight", "block_sparse_moe.experts.*.w3.weight"))),
        weights.experts("moe_down",
            dims.experts, ("", dims.hidden), ("inner", dims.size), weights.Stacked("mlp.experts.down_proj"),
            weights.PerExpert(("block_sparse_moe.experts.*.w2.weight",))),
    ]


def moe_route(w: Layer, x_TD: Tensor, dims: Dims) -> tuple[Tensor, Tensor]:
    # spec: moe.moe.router
    scores_TE = project(x_TD, w.moe_router)
    weights_TK, experts_TK = top_k(scores_TE, dims.top_k, w.moe_routed, by_order=True)
    weights_TK = sparsemixer(scores_TE, experts_TK, dims.jitter)
    return weights_TK.to(x_TD.dtype), experts_TK


def moe_experts(w: Layer, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, dims: Dims) -> Tensor:
    # spec: moe.moe
    return experts(x_TD, weights_TK, experts_TK, w.moe_gate_up, w.moe_down, act="silu", layout="out_in")


def layer_layer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    # spec: block[0]
    h_TD = layer_norm(x_TD, w.input_layernorm, w.input_layernorm_bias, dims.eps)
    h_TD = attention_attention(w, h_TD, dims, step)  # writes K/V pages
    x_TD = x_TD + h_TD
    # spec: block[1]
    h_TD = layer_norm(x_TD, w.post_attention_layernorm, w.post_attention_layernorm_bias, dims.eps)
    routes = moe_route(w, h_TD, dims)
    h_TD = moe_experts(w, h_TD, *routes, dims)
    return x_TD + h_TD


# by kind: the layer function, the entries that keep state, and the tables of weights; a layer's tensors are below LAYER
LAYERS: dict[str, Callable[..., Tensor]] = {"layer": layer_layer}
MIXERS: dict[str, tuple[str, ...]] = {"layer": ("attention",)}
WEIGHTS: dict[str, tuple[Callable[[Dims], list[weights.Weight]], ...]] = {
    "model": (model_weights,),
    "layer": (block_weights, attention_weights, moe_weights),
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
        return layer_norm(x_TD, w.norm, w.norm_bias, dims.eps)

    def logits(self, x_RD: Tensor) -> Tensor:
        """Hidden states (R, D) to logits (R, V)."""
        w = self.weights
        return project(x_RD, w.lm_head, w.lm_head_bias)
