# Generated from specs/gpt2.yaml. Do not edit: change the spec or the templates,
# then run `flexgen build specs/gpt2.yaml`.
"""GPT-2: learned positions, layer norms, packed and transposed projections.

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
from flexgen.runtime.ops.elementwise import embed, gelu_new, layer_norm, project

from .attention import attention_attention, attention_weights

ABI = 3
MODEL_TYPES = ("gpt2",)
TEXT_CONFIG = None
PREFIXES = ("transformer", "")
SKIP = ("h.*.attn.bias", "h.*.attn.masked_bias")
DEFAULTS = {
    "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "activation_function": "gelu_new", "n_positions": 1024,
    "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False,
}
REQUIRE = {
    "activation_function": ["gelu_new", "gelu_pytorch_tanh"], "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False,
}
IGNORE = (
    "reorder_and_upcast_attn", "n_ctx", "summary_type", "summary_use_proj", "summary_activation",
    "summary_proj_to_labels", "summary_first_dropout",
)


class Dims(Numbers):
    """The numbers of one checkpoint."""

    def __init__(self, raw: dict, ignore: tuple[str, ...] = ()) -> None:
        """Bind the numbers to a config.json. Raises ConfigError for whatever this package does not describe."""
        config = Config(raw, model_types=MODEL_TYPES, defaults=DEFAULTS, require=REQUIRE,
                        ignore=(*IGNORE, *ignore), layers_by=None)
        self.vocab = config.int("vocab_size")
        self.hidden = config.int("n_embd")
        self.layers = config.int("n_layer")
        self.heads = config.int("n_head", nonzero=True)
        self.head_dim = self.hidden // self.heads
        self.inner = 4 * self.hidden
        self.size = config.int("n_inner", default=self.inner)
        self.positions = config.int("n_positions")
        self.eps = config.float("layer_norm_epsilon")
        self.tied = config.flag("tie_word_embeddings")
        self.kinds = config.schedule(self.layers, (schedule.everywhere("layer"),))
        config.finish()


def model_weights(dims: Dims) -> list[weights.Weight]:
    # spec: embedding, head
    return [
        weights.embedding("wte", dims.vocab, dims.hidden),
        weights.positions("wpe", dims.positions, dims.hidden),
        weights.norm("ln_f", dims.hidden),
        weights.bias("ln_f_bias", (dims.hidden,), "ln_f.bias", axes=("",)),
        weights.head("lm_head", dims.vocab, dims.hidden, same_as="wte" if dims.tied else None),
    ]


def block_weights(dims: Dims) -> list[weights.Weight]:
    # spec: block
    return [
        weights.norm("ln_1", dims.hidden),
        weights.bias("ln_1_bias", (dims.hidden,), "ln_1.bias", axes=("",)),
        weights.norm("ln_2", dims.hidden),
        weights.bias("ln_2_bias", (dims.hidden,), "ln_2.bias", axes=("",)),
    ]


def mlp_weights(dims: Dims) -> list[weights.Weight]:
    # spec: mlp.mlp
    return [
        *weights.linear("mlp_up", {"mlp.c_fc": dims.size}, dims.hidden, out="inner", bias=True, transposed=True),
        *weights.linear("mlp_down", {"mlp.c_proj": dims.hidden}, dims.size, into="inner", bias=True, transposed=True),
    ]


def mlp(w: Layer, x_TD: Tensor) -> Tensor:
    # spec: mlp.mlp
    up_TI = project(x_TD, w.mlp_up.t(), w.mlp_up_bias)
    return project(gelu_new(up_TI), w.mlp_down.t(), w.mlp_down_bias)


def layer_layer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    # spec: block[0]
    h_TD = layer_norm(x_TD, w.ln_1, w.ln_1_bias, dims.eps)
    h_TD = attention_attention(w, h_TD, dims, step)  # writes K/V pages
    x_TD = x_TD + h_TD
    # spec: block[1]
    h_TD = layer_norm(x_TD, w.ln_2, w.ln_2_bias, dims.eps)
    h_TD = mlp(w, h_TD)
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
        x_TD = embed(ids_T, w.wte)
        x_TD = x_TD + F.embedding(step.positions_T, w.wpe)
        for layer, run in zip(self.layers, self.run):
            x_TD = run(layer, x_TD, dims, step)
        return layer_norm(x_TD, w.ln_f, w.ln_f_bias, dims.eps)

    def logits(self, x_RD: Tensor) -> Tensor:
        """Hidden states (R, D) to logits (R, V)."""
        w = self.weights
        return project(x_RD, w.lm_head)
