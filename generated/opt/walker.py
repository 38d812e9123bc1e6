# Generated from specs/opt.yaml. Do not edit: change the spec or the templates,
# then run `flexgen build specs/opt.yaml`.
"""OPT: learned positions behind an offset, layer norms before, an MLP without gate.

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
MODEL_TYPES = ("opt",)
TEXT_CONFIG = None
PREFIXES = ("model.decoder", "decoder")
SKIP = ()
DEFAULTS = {
    "tie_word_embeddings": True, "activation_function": "relu", "do_layer_norm_before": True,
    "_remove_final_layer_norm": False, "enable_bias": True, "layer_norm_elementwise_affine": True,
}
REQUIRE = {
    "activation_function": "relu", "do_layer_norm_before": True, "_remove_final_layer_norm": False,
    "layer_norm_elementwise_affine": True,
}
IGNORE = ("word_embed_proj_dim", "layerdrop", "init_std", "dropout", "output_projection", "prefix")


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
        self.size = config.int("ffn_dim")
        self.positions = config.int("max_position_embeddings")
        self.eps = 1e-5
        self.bias = config.flag("enable_bias")
        self.tied = config.flag("tie_word_embeddings")
        self.kinds = config.schedule(self.layers, (schedule.everywhere("layer"),))
        config.finish()


def model_weights(dims: Dims) -> list[weights.Weight]:
    # spec: embedding, head
    return [
        weights.embedding("embed_tokens", dims.vocab, dims.hidden),
        weights.positions("embed_positions", dims.positions + 2, dims.hidden),
        weights.norm("final_layer_norm", dims.hidden),
        weights.bias("final_layer_norm_bias", (dims.hidden,), "final_layer_norm.bias", axes=("",)),
        weights.head("lm_head", dims.vocab, dims.hidden, same_as="embed_tokens" if dims.tied else None),
    ]


def block_weights(dims: Dims) -> list[weights.Weight]:
    # spec: block
    return [
        weights.norm("self_attn_layer_norm", dims.hidden),
        weights.bias("self_attn_layer_norm_bias", (dims.hidden,), "self_attn_layer_norm.bias", axes=("",)),
        weights.norm("final_layer_norm", dims.hidden),
        weights.bias("final_layer_norm_bias", (dims.hidden,), "final_layer_norm.bias", axes=("",)),
    ]


def mlp_weights(dims: Dims) -> list[weights.Weight]:
    # spec: mlp.mlp
    return [
        *weights.linear("mlp_up", {"fc1": dims.size}, dims.hidden, out="inner", bias=dims.bias),
        *weights.linear("mlp_down", {"fc2": dims.hidden}, dims.size, into="inner", bias=dims.bias),
    ]


def mlp(w: Layer, x_TD: Tensor) -> Tensor:
    # spec: mlp.mlp
    up_TI = project(x_TD, w.mlp_up, w.mlp_up_bias)
    return project(F.relu(up_TI), w.mlp_down, w.mlp_down_bias)


def layer_layer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    # spec: block[0]
    h_TD = layer_norm(x_TD, w.self_attn_layer_norm, w.self_attn_layer_norm_bias, dims.eps)
    h_TD = attention_attention(w, h_TD, dims, step)  # writes K/V pages
    x_TD = x_TD + h_TD
    # spec: block[1]
    h_TD = layer_norm(x_TD, w.final_layer_norm, w.final_layer_norm_bias, dims.eps)
    h_TD = mlp(w, h_TD)
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
        x_TD = embed(ids_T, w.embed_tokens)
        x_TD = x_TD + F.embedding(step.positions_T + 2, w.embed_positions)
        for layer, run in zip(self.layers, self.run):
            x_TD = run(layer, x_TD, dims, step)
        return layer_norm(x_TD, w.final_layer_norm, w.final_layer_norm_bias, dims.eps)

    def logits(self, x_RD: Tensor) -> Tensor:
        """Hidden states (R, D) to logits (R, V)."""
        w = self.weights
        return project(x_RD, w.lm_head)
