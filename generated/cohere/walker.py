# Generated from specs/cohere.yaml. Do not edit: change the spec or the templates,
# then run `flexgen build specs/cohere.yaml`.
"""Cohere: one norm, attention and MLP in parallel, norms of q and k with weights of each head.

T tokens of one step   D model width   I inner width   E experts   V vocabulary   R rows that want logits
w the layer's weights, pages and state   dims the checkpoint's numbers
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from flexgen.contract import layer_kinds as schedule, weights
from flexgen.contract.abi import Layer, Step
from flexgen.contract.heads import check_heads
from flexgen.contract.numbers import Numbers
from flexgen.runtime.loading.config import Config
from flexgen.runtime.ops.elementwise import embed, layer_norm, project

from .attention import bare_attention, bare_weights, normed_attention, normed_weights

ABI = 3
MODEL_TYPES = ("cohere",)
TEXT_CONFIG = None
PREFIXES = ("model",)
SKIP = ()
DEFAULTS = {
    "layer_norm_eps": 1e-5, "attention_bias": False, "tie_word_embeddings": True, "hidden_act": "silu",
    "logit_scale": 0.0625, "use_qk_norm": False, "rope_parameters": {"rope_theta": 500000.0},
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
        self.layers = config.int("num_hidden_layers")
        self.heads = config.int("num_attention_heads", nonzero=True)
        self.kv_heads = config.int("num_key_value_heads", default=self.heads)
        self.head_dim = self.hidden // self.heads
        self.size = config.int("intermediate_size")
        self.eps = config.float("layer_norm_eps")
        self.bias = config.flag("attention_bias")
        self.logit_scale = config.float("logit_scale")
        self.tied = config.flag("tie_word_embeddings")
        self.rope = config.rope("rope_parameters", types=("default", "linear", "llama3", "yarn"), head_dim=self.head_dim)
        check_heads("attention.bare", heads=self.heads, kv_heads=self.kv_heads)
        self.kinds = config.schedule(self.layers, (
            schedule.everywhere("bare"),
            # one flag gives every layer norms of q and k
            schedule.everywhere("normed", when=config.optional("use_qk_norm")),
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


def block(w: Layer, x_TD: Tensor, dims: Dims, step: Step, attention: Callable[..., Tensor]) -> Tensor:
    # spec: block[0]
    h_TD = layer_norm(x_TD, w.input_layernorm, None, dims.eps)
    attention_TD = attention(w, h_TD, dims, step)  # writes K/V pages
    mlp_TD = mlp(w, h_TD)
    return x_TD + attention_TD + mlp_TD


def bare_layer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    return block(w, x_TD, dims, step, bare_attention)


def normed_layer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    return block(w, x_TD, dims, step, normed_attention)


# by kind: the layer function, the entries that keep state, and the tables of weights; a layer's tensors are below LAYER
LAYERS: dict[str, Callable[..., Tensor]] = {"bare": bare_layer, "normed": normed_layer}
MIXERS: dict[str, tuple[str, ...]] = {"bare": ("bare",), "normed": ("normed",)}
WEIGHTS: dict[str, tuple[Callable[[Dims], list[weights.Weight]], ...]] = {
    "model": (model_weights,),
    "bare": (block_weights, bare_weights, mlp_weights),
    "normed": (block_weights, normed_weights, mlp_weights),
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
        return layer_norm(x_TD, w.norm, None, dims.eps)

    def logits(self, x_RD: Tensor) -> Tensor:
        """Hidden states (R, D) to logits (R, V)."""
        w, dims = self.weights, self.dims
        return project(x_RD, w.lm_head) * dims.logit_scale
