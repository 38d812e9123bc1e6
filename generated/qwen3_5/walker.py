# Generated from specs/qwen3_5.yaml. Do not edit: change the spec or the templates,
# then run `flexgen build specs/qwen3_5.yaml`.
"""Qwen 3.5 dense: three gated-delta layers to one full attention layer.

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
from flexgen.runtime.ops.elementwise import embed, project, rms_norm_one_plus

from .attention import full_attention, full_weights, gdn_mixer, gdn_weights

ABI = 3
MODEL_TYPES = ("qwen3_5_text", "qwen3_5")
TEXT_CONFIG = "text_config"
PREFIXES = ("model", "model.language_model")
SKIP = ("mtp.*", "model.visual.*")
DEFAULTS = {
    "rms_norm_eps": 1e-6, "head_dim": 256, "attention_bias": False, "tie_word_embeddings": False, "hidden_act": "silu",
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "full_attention_interval": 4,
    "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
REQUIRE = {"hidden_act": "silu"}
IGNORE = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype", "attn_output_gate")


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
        self.key_heads = config.int("linear_num_key_heads")
        self.key_dim = config.int("linear_key_head_dim")
        self.value_heads = config.int("linear_num_value_heads")
        self.value_dim = config.int("linear_value_head_dim")
        self.kernel = config.int("linear_conv_kernel_dim")
        self.size = config.int("intermediate_size")
        self.eps = config.float("rms_norm_eps")
        self.attention_bias = config.flag("attention_bias")
        self.tied = config.flag("tie_word_embeddings")
        self.rope = config.rope("rope_parameters", types=("default",), head_dim=self.head_dim)
        check_heads("attention.full", heads=self.heads, kv_heads=self.kv_heads)
        check_heads("gdn.gdn", value_heads=self.value_heads, key_heads=self.key_heads)
        self.kinds = config.schedule(self.layers, (
            schedule.everywhere("linear"),
            schedule.every(config.optional("full_attention_interval"), "full"),
            schedule.by(config.optional("layer_types"), {"linear_attention": "linear", "full_attention": "full"}),
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


def block(w: Layer, x_TD: Tensor, dims: Dims, step: Step, mixer: Callable[..., Tensor]) -> Tensor:
    # spec: block[0]
    h_TD = rms_norm_one_plus(x_TD, w.input_layernorm, dims.eps)
    h_TD = mixer(w, h_TD, dims, step)  # reads and writes its state, or writes K/V pages
    x_TD = x_TD + h_TD
    # spec: block[1]
    h_TD = rms_norm_one_plus(x_TD, w.post_attention_layernorm, dims.eps)
    h_TD = mlp(w, h_TD)
    return x_TD + h_TD


def linear_layer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    return block(w, x_TD, dims, step, gdn_mixer)


def full_layer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    return block(w, x_TD, dims, step, full_attention)


# by kind: the layer function, the entries that keep state, and the tables of weights; a layer's tensors are below LAYER
LAYERS: dict[str, Callable[..., Tensor]] = {"linear": linear_layer, "full": full_layer}
MIXERS: dict[str, tuple[str, ...]] = {"linear": ("gdn",), "full": ("full",)}
WEIGHTS: dict[str, tuple[Callable[[Dims], list[weights.Weight]], ...]] = {
    "model": (model_weights,),
    "linear": (block_weights, gdn_weights, mlp_weights),
    "full": (block_weights, full_weights, mlp_weights),
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
        return rms_norm_one_plus(x_TD, w.norm, dims.eps)

    def logits(self, x_RD: Tensor) -> Tensor:
        """Hidden states (R, D) to logits (R, V)."""
        w = self.weights
        return project(x_RD, w.lm_head)
