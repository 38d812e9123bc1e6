# Generated from specs/gemma4_e.yaml. Do not edit: change the spec or the templates,
# then run `flexgen build specs/gemma4_e.yaml`.
"""Gemma 4 E2B and E4B: per-layer input embeddings, and last layers that read the K/V of earlier ones.

T tokens of one step   D model width   I inner width   E experts   V vocabulary   R rows that want logits
w the layer's weights, pages and state   dims the checkpoint's numbers
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from flexgen.contract import layer_kinds as schedule, weights
from flexgen.contract.abi import Layer, Step
from flexgen.contract.heads import check_heads
from flexgen.contract.numbers import Numbers
from flexgen.runtime.loading.config import Config
from flexgen.runtime.ops.elementwise import embed, project, rms_norm, rounded, softcap

from .attention import (
    full_attention, full_shared_attention, full_shared_weights, full_weights,
    sliding_attention, sliding_shared_attention, sliding_shared_weights, sliding_weights,
)

ABI = 3
MODEL_TYPES = ("gemma4_text", "gemma4")
TEXT_CONFIG = "text_config"
PREFIXES = ("model", "model.language_model")
SKIP = (
    "model.vision_tower.*", "model.audio_tower.*", "model.embed_vision.*", "model.embed_audio.*",
    "layers.*.self_attn.k_proj.weight", "layers.*.self_attn.v_proj.weight", "layers.*.self_attn.k_norm.weight",
)
DEFAULTS = {
    "rms_norm_eps": 1e-6, "attention_bias": False, "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": None, "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144, "num_kv_shared_layers": 0, "enable_moe_block": False,
    "attention_k_eq_v": False, "use_double_wide_mlp": False, "global_head_dim": 512, "sliding_window": 512,
}
REQUIRE = {
    "hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": [None, "vision"],
    "enable_moe_block": False, "attention_k_eq_v": False, "hidden_size_per_layer_input": {"min": 1},
    "num_kv_shared_layers": {"min": 1},
}
IGNORE = ("num_global_key_value_heads",)


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
        self.full_head_dim = config.int("layers.full_attention.head_dim", "global_head_dim")
        self.window = config.int("sliding_window")
        self.size = config.int("intermediate_size")
        self.wide_size = self.size * (1 + config.number("use_double_wide_mlp"))
        self.shared_layers = config.int("num_kv_shared_layers")
        self.input_size = config.int("hidden_size_per_layer_input")
        self.input_vocab = config.int("vocab_size_per_layer_input")
        self.eps = config.float("rms_norm_eps")
        self.attention_bias = config.flag("attention_bias")
        self.softcap = config.float("final_logit_softcapping", default=0)
        self.tied = config.flag("tie_word_embeddings")
        self.sliding_rope = config.rope("rope_parameters.sliding_attention", types=("default",), head_dim=self.head_dim)
        self.full_rope = config.rope("rope_parameters.full_attention", types=("proportional",), head_dim=self.full_head_dim)
        check_heads("attention.sliding", heads=self.heads, kv_heads=self.kv_heads)
        self.kinds = config.schedule(self.layers, (
            schedule.everywhere("sliding"),
            schedule.every(6, "full"),
            schedule.by(config.optional("layer_types"), {"sliding_attention": "sliding", "full_attention": "full"}),
            schedule.last(1, "full"),
            schedule.last(self.shared_layers, {"sliding": "sliding_shared", "full": "full_shared"}),
        ))
        config.finish()


def model_weights(dims: Dims) -> list[weights.Weight]:
    # spec: embedding, head
    return [
        weights.embedding("embed_tokens", dims.vocab, dims.hidden),
        *weights.linear("per_layer_model_projection", {
            "per_layer_model_projection": dims.layers * dims.input_size,
        }, dims.hidden),
        weights.norm("per_layer_projection_norm", dims.input_size),
        weights.embedding("embed_tokens_per_layer", dims.input_vocab, dims.layers * dims.input_size),
        weights.norm("norm", dims.hidden),
        weights.head("lm_head", dims.vocab, dims.hidden, same_as="embed_tokens" if dims.tied else None),
    ]


def block_weights(dims: Dims) -> list[weights.Weight]:
    # spec: block
    return [
        weights.norm("input_layernorm", dims.hidden),
        weights.norm("post_attention_layernorm", dims.hidden),
        weights.norm("pre_feedforward_layernorm", dims.hidden),
        weights.norm("post_feedforward_layernorm", dims.hidden),
        *weights.linear("per_layer_input_gate", {"per_layer_input_gate": dims.input_size}, dims.hidden),
        *weights.linear("per_layer_projection", {"per_layer_projection": dims.hidden}, dims.input_size),
        weights.norm("post_per_layer_input_norm", dims.hidden),
        weights.vector("layer_scalar", 1),
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
    return project(F.gelu(gate_TI, approximate="tanh") * up_TI, w.mlp_down)


def wide_weights(dims: Dims) -> list[weights.Weight]:
    # spec: mlp.wide
    return [
        *weights.linear("wide_gate_up", {"mlp.gate_proj": dims.wide_size, "mlp.up_proj": dims.wide_size}, dims.hidden,
            out="inner"),
        *weights.linear("wide_down", {"mlp.down_proj": dims.hidden}, dims.wide_size, into="inner"),
    ]


def wide(w: Layer, x_TD: Tensor) -> Tensor:
    # spec: mlp.wide
    gate_TI, up_TI = project(x_TD, w.wide_gate_up).chunk(2, dim=-1)
    return project(F.gelu(gate_TI, approximate="tanh") * up_TI, w.wide_down)


def block(
    w: Layer, x_TD: Tensor, per_layer_TI: Tensor, dims: Dims, step: Step, attention: Callable[..., Tensor],
    feed_forward: Callable[..., Tensor],
) -> Tensor:
    # spec: block[0]
    h_TD = rms_norm(x_TD, w.input_layernorm, dims.eps)
    h_TD = attention(w, h_TD, dims, step)  # writes K/V pages, or reads the K/V pages of an earlier layer
    x_TD = x_TD + rms_norm(h_TD, w.post_attention_layernorm, dims.eps)
    # spec: block[1]
    h_TD = rms_norm(x_TD, w.pre_feedforward_layernorm, dims.eps)
    h_TD = feed_forward(w, h_TD)
    x_TD = x_TD + rms_norm(h_TD, w.post_feedforward_layernorm, dims.eps)
    # spec: block[2]
    h_TI = project(x_TD, w.per_layer_input_gate)
    h_TI = F.gelu(h_TI, approximate="tanh") * per_layer_TI
    h_TD = project(h_TI, w.per_layer_projection)
    x_TD = x_TD + rms_norm(h_TD, w.post_per_layer_input_norm, dims.eps)
    # spec: block[3]
    return x_TD * w.layer_scalar  # multiplies the whole stream, not the branch


def sliding_layer(w: Layer, x_TD: Tensor, per_layer_TI: Tensor, dims: Dims, step: Step) -> Tensor:
    return block(w, x_TD, per_layer_TI, dims, step, sliding_attention, mlp)


def full_layer(w: Layer, x_TD: Tensor, per_layer_TI: Tensor, dims: Dims, step: Step) -> Tensor:
    return block(w, x_TD, per_layer_TI, dims, step, full_attention, mlp)


def sliding_shared_layer(w: Layer, x_TD: Tensor, per_layer_TI: Tensor, dims: Dims, step: Step) -> Tensor:
    return block(w, x_TD, per_layer_TI, dims, step, sliding_shared_attention, wide)


def full_shared_layer(w: Layer, x_TD: Tensor, per_layer_TI: Tensor, dims: Dims, step: Step) -> Tensor:
    return block(w, x_TD, per_layer_TI, dims, step, full_shared_attention, wide)


# by kind: the layer function, the entries that keep state, and the tables of weights; a layer's tensors are below LAYER
LAYERS: dict[str, Callable[..., Tensor]] = {
    "sliding": sliding_layer, "full": full_layer, "sliding_shared": sliding_shared_layer,
    "full_shared": full_shared_layer,
}
MIXERS: dict[str, tuple[str, ...]] = {
    "sliding": ("sliding",), "full": ("full",), "sliding_shared": ("sliding_shared",), "full_shared": ("full_shared",),
}
WEIGHTS: dict[str, tuple[Callable[[Dims], list[weights.Weight]], ...]] = {
    "model": (model_weights,),
    "sliding": (block_weights, sliding_weights, mlp_weights),
    "full": (block_weights, full_weights, mlp_weights),
    "sliding_shared": (block_weights, sliding_shared_weights, wide_weights),
    "full_shared": (block_weights, full_shared_weights, wide_weights),
}
LAYER = "layers.*"


class Walker:
    """The model: embedding, the schedule's layers, head. `run` holds one function a layer, of LAYERS or compiled."""

    def __init__(self, dims: Dims, weights: Layer, layers: list[Layer], run: list[Callable[..., Tensor]]) -> None:
        self.dims, self.weights, self.layers, self.run = dims, weights, layers, run

    def forward(self, ids_T: Tensor, step: Step) -> Tensor:
        """Token ids (T,) to hidden states (T, D) after the final norm; writes K/V pages and state."""
        w, dims = self.weights, self.dims
        x_TD = embed(ids_T, w.embed_tokens) * rounded(math.sqrt(dims.hidden), w.embed_tokens.dtype)
        # spec: layer_inputs.per_layer
        per_layer_model_projection_TLI = project(x_TD, w.per_layer_model_projection).unflatten(-1, (dims.layers, dims.input_size))
        per_layer_model_projection_TLI = per_layer_model_projection_TLI * (1 / math.sqrt(dims.hidden))
        per_layer_model_projection_TLI = rms_norm(per_layer_model_projection_TLI, w.per_layer_projection_norm, dims.eps)
        embed_tokens_per_layer_TLI = embed(ids_T, w.embed_tokens_per_layer).unflatten(-1, (dims.layers, dims.input_size))
        embed_tokens_per_layer_TLI = embed_tokens_per_layer_TLI * rounded(math.sqrt(dims.input_size), w.embed_tokens_per_layer.dtype)
        per_layer_TLI = per_layer_model_projection_TLI + embed_tokens_per_layer_TLI
        per_layer_TLI = per_layer_TLI * (1 / math.sqrt(2))
        for layer, run, *inputs in zip(self.layers, self.run, per_layer_TLI.unbind(1)):
            x_TD = run(layer, x_TD, *inputs, dims, step)
        return rms_norm(x_TD, w.norm, dims.eps)

    def logits(self, x_RD: Tensor) -> Tensor:
        """Hidden states (R, D) to logits (R, V)."""
        w, dims = self.weights, self.dims
        return softcap(project(x_RD, w.lm_head), dims.softcap)
