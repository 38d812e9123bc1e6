# Generated from specs/falcon.yaml. Do not edit: change the spec or the templates,
# then run `flexgen build specs/falcon.yaml`.
"""Falcon 7B: one key/value head, one layer norm, attention and MLP in parallel.

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

from .attention import attention_attention, attention_weights

ABI = 3
MODEL_TYPES = ("falcon",)
TEXT_CONFIG = None
PREFIXES = ("transformer",)
SKIP = ()
DEFAULTS = {
    "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "activation": "gelu", "bias": False, "alibi": False,
    "multi_query": True, "parallel_attn": True, "new_decoder_architecture": False,
    "rope_parameters": {"rope_theta": 10000.0},
}
REQUIRE = {
    "activation": "gelu", "alibi": False, "multi_query": True, "parallel_attn": True, "new_decoder_architecture": False,
}
IGNORE = ("num_kv_heads", "num_ln_in_parallel_attn", "apply_residual_connection_post_layernorm")


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
        self.head_dim = self.hidden // self.heads
        self.inner = 4 * self.hidden
        self.size = config.int("ffn_hidden_size", default=self.inner)
        self.eps = config.float("layer_norm_epsilon")
        self.bias = config.flag("bias")
        self.tied = config.flag("tie_word_embeddings")
        self.rope = config.rope("rope_parameters", types=("default", "linear", "llama3", "yarn"), head_dim=self.head_dim)
        check_heads("attention.attention", heads=self.heads, kv_heads=1)
        self.kinds = config.schedule(self.layers, (schedule.everywhere("layer"),))
        config.finish()


def model_weights(dims: Dims) -> list[weights.Weight]:
    # spec: embedding, head
    return [
        weights.embedding("word_embeddings", dims.vocab, dims.hidden),
        weights.norm("ln_f", dims.hidden),
        weights.bias("ln_f_bias", (dims.hidden,), "ln_f.bias", axes=("",)),
        weights.head("lm_head", dims.vocab, dims.hidden, same_as="word_embeddings" if dims.tied else None),
    ]


def block_weights(dims: Dims) -> list[weights.Weight]:
    # spec: block
    return [
        weights.norm("input_layernorm", dims.hidden),
        weights.bias("input_layernorm_bias", (dims.hidden,), "input_layernorm.bias", axes=("",)),
    ]


def mlp_weights(dims: Dims) -> list[weights.Weight]:
    # spec: mlp.mlp
    return [
        *weights.linear("mlp_up", {"mlp.dense_h_to_4h": dims.size}, dims.hidden, out="inner", bias=dims.bias),
        *weights.linear("mlp_down", {"mlp.dense_4h_to_h": dims.hidden}, dims.size, into="inner", bias=dims.bias),
    ]


def mlp(w: Layer, x_TD: Tensor) -> Tensor:
    # spec: mlp.mlp
    up_TI = project(x_TD, w.mlp_up, w.mlp_up_bias)
    return project(F.gelu(up_TI), w.mlp_down, w.mlp_down_bias)


def layer_layer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    # spec: block[0]
    h_TD = layer_norm(x_TD, w.input_layernorm, w.input_layernorm_bias, dims.eps)
    attention_TD = attention_attention(w, h_TD, dims, step)  # writes K/V pages
    mlp_TD = mlp(w, h_TD)
    h_TD = attention_TD + mlp_TD
    return x_TD + h_TD


# by kind: the layer function, the entries that keep state, and the tables of weights; a layer's tensors are below LAYER
LAYERS: dict[str, Callable[..., Tensor]] = {"layer": layer_layer}
MIXERS: dict[str, tuple[str, ...]] = {"layer": ("attention",)}
WEIGHTS: dict[str, tuple[Callable[[Dims], list[weights.Weight]], ...]] = {
    "model": (model_weights,),
    "layer": (block_weights, attention_weights, mlp_weights),
}
LAYER = "h.*"


class Walker:
    """The model: embedding, the schedule's layers, head. `run` holds one function a layer, of LAYERS or compiled."""

    def __init__(self, dims: Dims, weights: Layer, layers: list[Layer], run: list[Callable[..., Tensor]]) -> None:
        self.dims, self.weights, self.layers, self.run = dims, weights, layers, run

    def forward(self, ids_T: Tensor, step: Step) -> Tensor:
        """Token ids (T,) to hidden states (T, D) after the final norm; writes K/V pages and state."""
        w, dims = self.weights, self.dims
        x_TD = embed(ids_T, w.word_embeddings)
        for layer, run in zip(self.layers, self.run):
            x_TD = run(layer, x_TD, dims, step)
        return layer_norm(x_TD, w.ln_f, w.ln_f_bias, dims.eps)

    def logits(self, x_RD: Tensor) -> Tensor:
        """Hidden states (R, D) to logits (R, V)."""
        w = self.weights
        return project(x_RD, w.lm_head)
