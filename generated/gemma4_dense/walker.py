# Generated from specs/gemma4_dense.yaml. Do not edit: change the spec or the templates,
# then run `flexgen build specs/gemma4_dense.yaml`.
"""Gemma 4, dense: two attention geometries, values taken from keys on full layers, sandwich norms.

T tokens of one step   D model width   I inner width   E experts   V vocabulary   R rows that want logits
w the layer's weights, pages and state   d, dims the checkpoint's numbers
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from flexgen.contract import layer_kinds as schedule
from flexgen.contract.abi import Layer, Pages, Part, State, Step, Weight
from flexgen.runtime.loading.config import Config
from flexgen.errors import ConfigError
from flexgen.runtime.ops.elementwise import project, rms_norm, rounded, softcap
from flexgen.runtime.loading.rope import Rope

from .attention import full_attention, sliding_attention

ABI = 2
# checkpoint
MODEL_TYPES = ("gemma4_text", "gemma4")
TEXT_CONFIG = "text_config"
PREFIXES = ("model", "model.language_model")
SKIP = ("model.vision_tower.*", "model.audio_tower.*", "model.embed_vision.*", "model.embed_audio.*")
DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "use_bidirectional_attention": None,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 0,
    "enable_moe_block": False,
    "attention_k_eq_v": False,
    "use_double_wide_mlp": False,
    "global_head_dim": 512,
    "sliding_window": 512,
}
REQUIRE = {
    "hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": [None, "vision"], "enable_moe_block":
    False, "attention_k_eq_v": True, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "use_double_wide_mlp":
    False,
}
IGNORE = ("vocab_size_per_layer_input",)


@dataclass(frozen=True)
class Dims:
    """The numbers of one checkpoint."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    full_kv_heads: int
    full_head_dim: int
    window: int
    size: int
    eps: float
    attention_bias: bool
    softcap: float
    tied: bool
    sliding_rope: Rope
    full_rope: Rope
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
        full_kv_heads = config.int("layers.full_attention.num_key_value_heads", "num_global_key_value_heads", default=kv_heads)
        full_head_dim = config.int("layers.full_attention.head_dim", "global_head_dim")
        window = config.int("sliding_window")
        size = config.int("intermediate_size")
        eps = config.float("rms_norm_eps")
        attention_bias = config.flag("attention_bias")
        softcap = config.float("final_logit_softcapping", default=0)
        tied = config.flag("tie_word_embeddings")
        sliding_rope = config.rope("rope_parameters.sliding_attention", types=("default",), head_dim=head_dim)
        full_rope = config.rope("rope_parameters.full_attention", types=("proportional",), head_dim=full_head_dim)
        if kv_heads < 1 or heads % kv_heads:
            raise ConfigError(f"attention.sliding gets {heads} heads, no multiple of its {kv_heads} kv_heads")
        if full_kv_heads < 1 or heads % full_kv_heads:
            raise ConfigError(f"attention.full gets {heads} heads, no multiple of its {full_kv_heads} kv_heads")
        kinds = config.schedule(layers, (
            schedule.everywhere("sliding"),
            schedule.every(6, "full"),
            schedule.by(config.optional("layer_types"), {"sliding_attention": "sliding", "full_attention": "full"}),
            schedule.last(1, "full"),
        ))
        config.finish()
        return cls(
            vocab, hidden, layers, heads, kv_heads, head_dim, full_kv_heads, full_head_dim, window, size, eps,
            attention_bias, softcap, tied, sliding_rope, full_rope, kinds,
        )


# state: what each entry keeps between steps
MIXERS: dict[str, tuple[str, ...]] = {
    "sliding": ("sliding",),
    "full": ("full",),
}


def state(d: Dims) -> dict[str, State]:
    """What a layer of each entry keeps."""
    return {
        "sliding": Pages(d.kv_heads, d.head_dim, window=d.window),
        "full": Pages(d.full_kv_heads, d.full_head_dim),
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
        Weight("pre_feedforward_layernorm", (d.hidden,), (Part("layers.*.pre_feedforward_layernorm.weight", d.hidden),)),
        Weight("post_feedforward_layernorm", (d.hidden,), (Part("layers.*.post_feedforward_layernorm.weight", d.hidden),)),
        Weight("layer_scalar", (1,), (Part("layers.*.layer_scalar", 1),)),
    ]


def sliding_weights(d: Dims) -> list[Weight]:
    # spec: attention.sliding
    return [
        Weight("qkv", (d.heads * d.head_dim + d.kv_heads * d.head_dim + d.kv_heads * d.head_dim, d.hidden), (
            Part("layers.*.self_attn.q_proj.weight", d.heads * d.head_dim),
            Part("layers.*.self_attn.k_proj.weight", d.kv_heads * d.head_dim),
            Part("layers.*.self_attn.v_proj.weight", d.kv_heads * d.head_dim),
        )),
        Weight("qkv_bias", (d.heads * d.head_dim + d.kv_heads * d.head_dim + d.kv_heads * d.head_dim,), (
            Part("layers.*.self_attn.q_proj.bias", d.heads * d.head_dim),
            Part("layers.*.self_attn.k_proj.bias", d.kv_heads * d.head_dim),
            Part("layers.*.self_attn.v_proj.bias", d.kv_heads * d.head_dim),
        ), present=d.attention_bias),
        Weight("o", (d.hidden, d.heads * d.head_dim), (Part("layers.*.self_attn.o_proj.weight", d.hidden),)),
        Weight("o_bias", (d.hidden,), (Part("layers.*.self_attn.o_proj.bias", d.hidden),), present=d.attention_bias),
        Weight("q_norm", (d.head_dim,), (Part("layers.*.self_attn.q_norm.weight", d.head_dim),)),
        Weight("k_norm", (d.head_dim,), (Part("layers.*.self_attn.k_norm.weight", d.head_dim),)),
    ]


def full_weights(d: Dims) -> list[Weight]:
    # spec: attention.full
    return [
        Weight("qk", (d.heads * d.full_head_dim + d.full_kv_heads * d.full_head_dim, d.hidden), (
            Part("layers.*.self_attn.q_proj.weight", d.heads * d.full_head_dim),
            Part("layers.*.self_attn.k_proj.weight", d.full_kv_heads * d.full_head_dim),
        )),
        Weight("qk_bias", (d.heads * d.full_head_dim + d.full_kv_heads * d.full_head_dim,), (
            Part("layers.*.self_attn.q_proj.bias", d.heads * d.full_head_dim),
            Part("layers.*.self_attn.k_proj.bias", d.full_kv_heads * d.full_head_dim),
        ), present=d.attention_bias),
        Weight("o", (d.hidden, d.heads * d.full_head_dim), (Part("layers.*.self_attn.o_proj.weight", d.hidden),)),
        Weight("o_bias", (d.hidden,), (Part("layers.*.self_attn.o_proj.bias", d.hidden),), present=d.attention_bias),
        Weight("q_norm", (d.full_head_dim,), (Part("layers.*.self_attn.q_norm.weight", d.full_head_dim),)),
        Weight("k_norm", (d.full_head_dim,), (Part("layers.*.self_attn.k_norm.weight", d.full_head_dim),)),
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
    "sliding": (block_weights, sliding_weights, mlp_weights),
    "full": (block_weights, full_weights, mlp_weights),
}
HEAD = "lm_head"


def mlp(w: Layer, x_TD: Tensor) -> Tensor:
    # spec: mlp.mlp
    gate_TI, up_TI = project(x_TD, w.mlp_gate_up).chunk(2, dim=-1)
    return project(F.gelu(gate_TI, approximate="tanh") * up_TI, w.mlp_down)


def sliding_layer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    # spec: block[0]
    h_TD = rms_norm(x_TD, w.input_layernorm, dims.eps)
    h_TD = sliding_attention(w, h_TD, dims, step)  # writes K/V pages
    x_TD = x_TD + rms_norm(h_TD, w.post_attention_layernorm, dims.eps)
    # spec: block[1]
    h_TD = rms_norm(x_TD, w.pre_feedforward_layernorm, dims.eps)
    h_TD = mlp(w, h_TD)
    x_TD = x_TD + rms_norm(h_TD, w.post_feedforward_layernorm, dims.eps)
    # spec: block[2]
    return x_TD * w.layer_scalar  # multiplies the whole stream, not the branch


def full_layer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    # spec: block[0]
    h_TD = rms_norm(x_TD, w.input_layernorm, dims.eps)
    h_TD = full_attention(w, h_TD, dims, step)  # the value is the raw key projection, before its norm and rope
    x_TD = x_TD + rms_norm(h_TD, w.post_attention_layernorm, dims.eps)
    # spec: block[1]
    h_TD = rms_norm(x_TD, w.pre_feedforward_layernorm, dims.eps)
    h_TD = mlp(w, h_TD)
    x_TD = x_TD + rms_norm(h_TD, w.post_feedforward_layernorm, dims.eps)
    # spec: block[2]
    return x_TD * w.layer_scalar  # multiplies the whole stream, not the branch


LAYERS: dict[str, Callable[..., Tensor]] = {
    "sliding": sliding_layer,
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
        x_TD = F.embedding(ids_T, w.embed_tokens) * rounded(math.sqrt(dims.hidden), w.embed_tokens.dtype)
        for layer, run in zip(self.layers, self.run):
            x_TD = run(layer, x_TD, dims, step)
        return rms_norm(x_TD, w.norm, dims.eps)

    def logits(self, x_RD: Tensor) -> Tensor:
        """Hidden states (R, D) to logits (R, V)."""
        w, dims = self.weights, self.dims
        return softcap(project(x_RD, w.lm_head), dims.softcap)
