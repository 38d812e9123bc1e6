# Generated from specs/qwen3_5.yaml. Do not edit: change the spec or the templates,
# then run `flexgen build specs/qwen3_5.yaml`.
"""Qwen 3.5 dense: three gated-delta layers to one full attention layer.

T tokens of one step   D model width   I inner width   E experts   V vocabulary   R rows that want logits
w the layer's weights, pages and state   d, dims the checkpoint's numbers
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen.contract import layer_kinds as schedule
from flexgen.contract.abi import Layer, Pages, Part, Slots, State, Step, Weight
from flexgen.runtime.loading.config import Config
from flexgen.errors import ConfigError
from flexgen.runtime.ops.elementwise import project, rms_norm_one_plus
from flexgen.runtime.loading.rope import Rope

from .attention import full_attention, gdn_mixer

ABI = 2
# checkpoint
MODEL_TYPES = ("qwen3_5_text", "qwen3_5")
TEXT_CONFIG = "text_config"
PREFIXES = ("model", "model.language_model")
SKIP = ("mtp.*", "model.visual.*")
DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
REQUIRE = {"hidden_act": "silu"}
IGNORE = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype", "attn_output_gate")


@dataclass(frozen=True)
class Dims:
    """The numbers of one checkpoint."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    kernel: int
    size: int
    eps: float
    attention_bias: bool
    tied: bool
    rope: Rope
    kinds: tuple[str, ...]

    @classmethod
    def from_config(cls, raw: dict, ignore: tuple[str, ...] = ()) -> Dims:
        """Bind the numbers to a config.json. Raises ConfigError for whatever this package does not describe."""
        config = Config(
            raw, model_types=MODEL_TYPES, defaults=DEFAULTS, require=REQUIRE, ignore=(*IGNORE, *ignore), layers_by="layer_types"
        )
        vocab = config.int("vocab_size")
        hidden = config.int("hidden_size")
        layers = config.int("num_hidden_layers")
        heads = config.int("num_attention_heads")
        kv_heads = config.int("num_key_value_heads")
        head_dim = config.int("head_dim")
        key_heads = config.int("linear_num_key_heads")
        key_dim = config.int("linear_key_head_dim")
        value_heads = config.int("linear_num_value_heads")
        value_dim = config.int("linear_value_head_dim")
        kernel = config.int("linear_conv_kernel_dim")
        size = config.int("intermediate_size")
        eps = config.float("rms_norm_eps")
        attention_bias = config.flag("attention_bias")
        tied = config.flag("tie_word_embeddings")
        rope = config.rope("rope_parameters", types=("default",), head_dim=head_dim)
        if kv_heads < 1 or heads % kv_heads:
            raise ConfigError(f"attention.full gets {heads} heads, no multiple of its {kv_heads} kv_heads")
        if key_heads < 1 or value_heads % key_heads:
            raise ConfigError(f"gdn.gdn gets {value_heads} value_heads, no multiple of its {key_heads} key_heads")
        kinds = config.schedule(layers, (
            schedule.everywhere("linear"),
            schedule.every(config.optional("full_attention_interval"), "full"),
            schedule.by(config.optional("layer_types"), {"linear_attention": "linear", "full_attention": "full"}),
        ))
        config.finish()
        return cls(
            vocab, hidden, layers, heads, kv_heads, head_dim, key_heads, key_dim, value_heads, value_dim, kernel, size,
            eps, attention_bias, tied, rope, kinds,
        )


# state: what each entry keeps between steps
MIXERS: dict[str, tuple[str, ...]] = {
    "linear": ("gdn",),
    "full": ("full",),
}


def state(d: Dims) -> dict[str, State]:
    """What a layer of each entry keeps."""
    return {
        "full": Pages(d.kv_heads, d.head_dim),
        "gdn": Slots(
            {
                "gdn_conv_state": ((2 * d.key_heads * d.key_dim + d.value_heads * d.value_dim, d.kernel), None),
                "gdn_state": ((d.value_heads, d.key_dim, d.value_dim), torch.float32),
            }
        ),
    }


def routes(d: Dims) -> dict[str, dict[str, int]]:
    """How many experts each token of a layer is sent to, by kind and by where its router leaves them on request."""
    return {}


# weights: role, shape, and the tensors of the checkpoint that fill it
def model_weights(d: Dims) -> list[Weight]:
    # spec: embedding, head
    return [
        Weight("embed_tokens", (d.vocab, d.hidden), (Part("embed_tokens.weight", d.vocab),)),
        Weight("norm", (d.hidden,), (Part("norm.weight", d.hidden),)),
        Weight("lm_head", (d.vocab, d.hidden), (Part("lm_head.weight", d.vocab),), same_as="embed_tokens" if d.tied else None),
    ]


def block_weights(d: Dims) -> list[Weight]:
    # spec: block
    return [
        Weight("input_layernorm", (d.hidden,), (Part("layers.*.input_layernorm.weight", d.hidden),)),
        Weight("post_attention_layernorm", (d.hidden,), (Part("layers.*.post_attention_layernorm.weight", d.hidden),)),
    ]


def full_weights(d: Dims) -> list[Weight]:
    # spec: attention.full
    return [
        Weight("qkv", (d.heads * 2 * d.head_dim + d.kv_heads * d.head_dim + d.kv_heads * d.head_dim, d.hidden), (
            Part("layers.*.self_attn.q_proj.weight", d.heads * 2 * d.head_dim),
            Part("layers.*.self_attn.k_proj.weight", d.kv_heads * d.head_dim),
            Part("layers.*.self_attn.v_proj.weight", d.kv_heads * d.head_dim),
        )),
        Weight("qkv_bias", (d.heads * 2 * d.head_dim + d.kv_heads * d.head_dim + d.kv_heads * d.head_dim,), (
            Part("layers.*.self_attn.q_proj.bias", d.heads * 2 * d.head_dim),
            Part("layers.*.self_attn.k_proj.bias", d.kv_heads * d.head_dim),
            Part("layers.*.self_attn.v_proj.bias", d.kv_heads * d.head_dim),
        ), present=d.attention_bias),
        Weight("o", (d.hidden, d.heads * d.head_dim), (Part("layers.*.self_attn.o_proj.weight", d.hidden),)),
        Weight("o_bias", (d.hidden,), (Part("layers.*.self_attn.o_proj.bias", d.hidden),), present=d.attention_bias),
        Weight("q_norm", (d.head_dim,), (Part("layers.*.self_attn.q_norm.weight", d.head_dim),)),
        Weight("k_norm", (d.head_dim,), (Part("layers.*.self_attn.k_norm.weight", d.head_dim),)),
    ]


def gdn_weights(d: Dims) -> list[Weight]:
    # spec: gdn.gdn
    return [
        Weight("gdn_in", (2 * (d.key_heads * d.key_dim + d.value_heads * d.value_dim + d.value_heads), d.hidden), (
            Part("layers.*.linear_attn.in_proj_qkv.weight", 2 * d.key_heads * d.key_dim + d.value_heads * d.value_dim),
            Part("layers.*.linear_attn.in_proj_z.weight", d.value_heads * d.value_dim),
            Part("layers.*.linear_attn.in_proj_b.weight", d.value_heads),
            Part("layers.*.linear_attn.in_proj_a.weight", d.value_heads),
        )),
        Weight("gdn_conv", (2 * d.key_heads * d.key_dim + d.value_heads * d.value_dim, 1, d.kernel), (
            Part("layers.*.linear_attn.conv1d.weight", 2 * d.key_heads * d.key_dim + d.value_heads * d.value_dim),
        )),
        Weight("gdn_a_log", (d.value_heads,), (Part("layers.*.linear_attn.A_log", d.value_heads),)),
        Weight("gdn_dt_bias", (d.value_heads,), (Part("layers.*.linear_attn.dt_bias", d.value_heads),)),
        Weight("gdn_norm", (d.value_dim,), (Part("layers.*.linear_attn.norm.weight", d.value_dim),)),
        Weight("gdn_out", (d.hidden, d.value_heads * d.value_dim), (Part("layers.*.linear_attn.out_proj.weight", d.hidden),)),
    ]


def mlp_weights(d: Dims) -> list[Weight]:
    # spec: mlp.mlp
    return [
        Weight("mlp_gate_up", (2 * d.size, d.hidden), (
            Part("layers.*.mlp.gate_proj.weight", d.size),
            Part("layers.*.mlp.up_proj.weight", d.size),
        )),
        Weight("mlp_down", (d.hidden, d.size), (Part("layers.*.mlp.down_proj.weight", d.hidden),)),
    ]


WEIGHTS: dict[str, tuple[Callable[[Dims], list[Weight]], ...]] = {
    "model": (model_weights,),
    "linear": (block_weights, gdn_weights, mlp_weights),
    "full": (block_weights, full_weights, mlp_weights),
}
HEAD = "lm_head"


def mlp(w: Layer, x_TD: Tensor) -> Tensor:
    # spec: mlp.mlp
    gate_TI, up_TI = project(x_TD, w.mlp_gate_up).chunk(2, dim=-1)
    return project(F.silu(gate_TI) * up_TI, w.mlp_down)


def linear_layer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    # spec: block[0]
    h_TD = rms_norm_one_plus(x_TD, w.input_layernorm, dims.eps)
    h_TD = gdn_mixer(w, h_TD, dims, step)  # reads and writes its state
    x_TD = x_TD + h_TD
    # spec: block[1]
    h_TD = rms_norm_one_plus(x_TD, w.post_attention_layernorm, dims.eps)
    h_TD = mlp(w, h_TD)
    x_TD = x_TD + h_TD
    return x_TD


def full_layer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    # spec: block[0]
    h_TD = rms_norm_one_plus(x_TD, w.input_layernorm, dims.eps)
    h_TD = full_attention(w, h_TD, dims, step)  # writes K/V pages
    x_TD = x_TD + h_TD
    # spec: block[1]
    h_TD = rms_norm_one_plus(x_TD, w.post_attention_layernorm, dims.eps)
    h_TD = mlp(w, h_TD)
    x_TD = x_TD + h_TD
    return x_TD


LAYERS: dict[str, Callable[..., Tensor]] = {
    "linear": linear_layer,
    "full": full_layer,
}


class Walker:
    """The model: embedding, the schedule's layers, head. `run` holds one function a layer, of LAYERS or compiled."""

    def __init__(self, dims: Dims, weights: Layer, layers: list[Layer], run: list[Callable[..., Tensor]]) -> None:
        self.dims = dims
        self.weights = weights
        self.layers = layers
        self.run = run

    def forward(self, ids_T: Tensor, step: Step) -> Tensor:
        """Token ids (T,) to hidden states (T, D) after the final norm; writes K/V pages and state."""
        w, dims = self.weights, self.dims
        x_TD = F.embedding(ids_T, w.embed_tokens)
        for layer, run in zip(self.layers, self.run):
            x_TD = run(layer, x_TD, dims, step)
        return rms_norm_one_plus(x_TD, w.norm, dims.eps)

    def logits(self, x_RD: Tensor) -> Tensor:
        """Hidden states (R, D) to logits (R, V)."""
        w = self.weights
        return project(x_RD, w.lm_head)
