# Generated from specs/gpt_neox.yaml. Do not edit: change the spec or the templates,
# then run `flexgen build specs/gpt_neox.yaml`.
"""GPT-NeoX and Pythia: attention and MLP in parallel, each with its layer norm; heads packed one by one.

T tokens of one step   D model width   I inner width   E experts   V vocabulary   R rows that want logits
w the layer's weights, pages and state   dims the checkpoint's numbers
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from flexgen.contract import layer_kinds as schedule, weights
from flexgen.contract.abi import Layer, Step
from flexgen.contract.numbers import Numbers
from flexgen.runtime.loading.config import Config
from flexgen.runtime.ops.elementwise import embed, layer_norm, project

from .attention import attention_attention, attention_weights

ABI = 3
MODEL_TYPES = ("gpt_neox",)
TEXT_CONFIG = None
PREFIXES = ("gpt_neox",)
SKIP = ("layers.*.attention.bias", "layers.*.attention.masked_bias", "layers.*.attention.rotary_emb.inv_freq")
DEFAULTS = {
    "layer_norm_eps": 1e-5, "attention_bias": True, "tie_word_embeddings": False, "hidden_act": "gelu",
    "use_parallel_residual": True, "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
REQUIRE = {"hidden_act": "gelu", "use_parallel_residual": True}
IGNORE = ("classifier_dropout", "is_decoder")


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
        self.size = config.int("intermediate_size")
        self.eps = config.float("layer_norm_eps")
        self.bias = config.flag("attention_bias")
        self.tied = config.flag("tie_word_embeddings")
        self.rope = config.rope("rope_parameters", types=("default", "linear", "llama3", "yarn"), head_dim=self.head_dim)
        self.kinds = config.schedule(self.layers, (schedule.everywhere("layer"),))
        config.finish()


def model_weights(dims: Dims) -> list[weights.Weight]:
    # spec: embedding, head
    return [
        weights.embedding("embed_in", dims.vocab, dims.hidden),
        weights.norm("final_layer_norm", dims.hidden),
        weights.bias("final_layer_norm_bias", (dims.hidden,), "final_layer_norm.bias", axes=("",)),
        weights.head("embed_out", dims.vocab, dims.hidden, same_as="embed_in" if dims.tied else None),
    ]


def block_weights(dims: Dims) -> list[weights.Weight]:
    # spec: block
    return [
        weights.norm("input_layernorm", dims.hidden),
        weights.bias("input_layernorm_bias", (dims.hidden,), "input_layernorm.bias", axes=("",)),
        weights.norm("post_attention_layernorm", dims.hidden),
        weights.bias("post_attention_layernorm_bias", (dims.hidden,), "post_attention_layernorm.bias", axes=("",)),
    ]


def mlp_weights(dims: Dims) -> list[weights.Weight]:
    # spec: mlp.mlp
    return [
        *weights.linear("mlp_up", {"mlp.dense_h_to_4h": dims.size}, dims.hidden, out="inner", bias=True),
        *weights.linear("mlp_down", {"mlp.dense_4h_to_h": dims.hidden}, dims.size, into="inner", bias=True),
    ]


def mlp(w: Layer, x_TD: Tensor) -> Tensor:
    # spec: mlp.mlp
    up_TI = project(x_TD, w.mlp_up, w.mlp_up_bias)
    return project(F.gelu(up_TI), w.mlp_down, w.mlp_down_bias)


def layer_layer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    # spec: block[0]
    attention_TD = layer_norm(x_TD, w.input_layernorm, w.input_layernorm_bias, dims.eps)
    attention_TD = attention_attention(w, attention_TD, dims, step)  # writes K/V pages
    mlp_TD = layer_norm(x_TD, w.post_attention_layernorm, w.post_attention_layernorm_bias, dims.eps)
    mlp_TD = mlp(w, mlp_TD)
    h_TD = attention_TD + mlp_TD
    return x_TD + h_TD


# by kind: the layer function, the entries that keep state, and the tables of weights; a layer's tensors are below LAYER
LAYERS: dict[str, Callable[..., Tensor]] = {"layer": layer_layer}
MIXERS: dict[str, tuple[str, ...]] = {"layer": ("attention",)}
WEIGHTS: dict[str, tuple[Callable[[Dims], list[weights.Weight]], ...]] = {
    "model": (model_weights,),
    "layer": (block_weights, attention_weights, mlp_weights),
}
LAYER = "layers.*"


class Walker:
    """The model: embedding, the schedule's layers, head. `run` holds one function a layer, of LAYERS or compiled."""

    def __init__(self, dims: Dims, weights: Layer, layers: list[Layer], run: list[Callable[..., Tensor]]) -> None:
        self.dims, self.weights, self.layers, self.run = dims, weights, layers, run

    def forward(self, ids_T: Tensor, step: Step) -> Tensor:
        """Token ids (T,) to hidden states (T, D) after the final norm; writes K/V pages and state."""
        w, dims = self.weights, self.dims
        x_TD = embed(ids_T, w.embed_in)
        for layer, run in zip(self.layers, self.run):
            x_TD = run(layer, x_TD, dims, step)
        return layer_norm(x_TD, w.final_layer_norm, w.final_layer_norm_bias, dims.eps)

    def logits(self, x_RD: Tensor) -> Tensor:
        """Hidden states (R, D) to logits (R, V)."""
        w = self.weights
        return project(x_RD, w.embed_out)
