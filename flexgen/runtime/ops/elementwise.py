"""Norms, activations and rotary embedding: the small arithmetic that generated code calls.

Each function repeats a family's exact order of operations and casts, since in bf16 another order is another result.
Every one traces under `torch.compile(fullgraph=True, dynamic=True)`, and all but `project` are plain torch.

Shape suffixes: T tokens, N heads, H head width. Norms and activations work on the last dim of any shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen.runtime.ops.library import define_op
from flexgen.runtime.ops.lora import Adapted

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": partial(F.gelu, approximate="tanh"),
        "gelu_new": lambda x: gelu_new(x),
        "quick_gelu": lambda x: quick_gelu(x),
        "relu": F.relu,
        "relu2": lambda x: relu2(x),
    }
)


def project(x_TD: Tensor, weight_OD: Tensor | Adapted, bias_O: Tensor | None = None) -> Tensor:
    """x W^T + b, (T, O), and what each token's adapter adds. Few tokens on CUDA have kernels of their own."""
    if isinstance(weight_OD, Adapted):
        return project(x_TD, weight_OD.weight, bias_O) + weight_OD.delta(x_TD)
    return torch.ops.flexgen.linear(x_TD, weight_OD, bias_O) if x_TD.is_cuda else F.linear(x_TD, weight_OD, bias_O)


def embed(ids_T: Tensor, weight_VD: Tensor | Adapted) -> Tensor:
    """The row of each id, (T, D), and what each token's adapter adds."""
    if isinstance(weight_VD, Adapted):
        return F.embedding(ids_T, weight_VD.weight) + weight_VD.delta_of_ids(ids_T)
    return F.embedding(ids_T, weight_VD)


def _linear_cuda(x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
    from flexgen.runtime.ops.kernels import linear  # Triton is there where CUDA is

    return (linear.linear if linear.serves(x_TD, weight_OD) else F.linear)(x_TD, weight_OD, bias_O)


def _linear_fake(x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
    return x_TD.new_empty((x_TD.shape[0], weight_OD.shape[0]))


def _linear_cpu(x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
    return F.linear(x_TD, weight_OD, bias_O)


define_op("linear", cpu=_linear_cpu, cuda=_linear_cuda, fake=_linear_fake)


def _normalise(x: Tensor, eps: float) -> Tensor:
    """x over its root mean square on the last dim, in fp32 (Zhang and Sennrich 2019, arXiv:1910.07467)."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """RMS norm whose product with the gain is fp32, cast once at the end. `gain` None: no gain."""
    h = _normalise(x, eps)
    if gain is not None:
        h = h * gain
    return h.to(x.dtype)


def rms_norm_cast_before(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMS norm cast to x's dtype before the product with the gain (llama, qwen3)."""
    return gain * _normalise(x, eps).to(x.dtype)


def rms_norm_one_plus(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMS norm with a zero-centred gain: the fp32 product with 1 + gain, cast once at the end (qwen3_5)."""
    return (_normalise(x, eps) * (1.0 + gain.float())).to(x.dtype)


def layer_norm(x: Tensor, gain: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm (Ba et al. 2016, arXiv:1607.06450) in fp32, cast once at the end. Each of gain and bias may be None.

    With a bias it is torch's own function, whose fp32 sums have an order of their own; without one it is in the order of Cohere's.
    """
    if bias is not None and gain is not None and gain.ndim == 1 and gain.dtype == bias.dtype == x.dtype:
        return F.layer_norm(x, gain.shape, gain, bias, eps)
    h = x.float()
    h = h - h.mean(-1, keepdim=True)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    if gain is not None:
        h = h * gain
    if bias is not None:
        h = h + bias
    return h.to(x.dtype)


def layer_norm_one_plus(x: Tensor, gain: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm with a zero-centred gain: the product with 1 + gain, which is rounded to the gain's dtype (nemotron)."""
    return layer_norm(x, gain + 1, bias, eps)


def l2_norm(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """x over its length, times the gain where there is one, in fp32 and cast once at the end."""
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).sum(-1, keepdim=True) + eps)
    if gain is not None:
        h = h * gain
    return h.to(x.dtype)


def gated_rms_norm(x: Tensor, z: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMS norm with its gain in x's dtype, then times the fp32 silu of z: norm before gate (qwen3_5)."""
    h = gain * _normalise(x, eps).to(x.dtype)
    return (h * F.silu(z.float())).to(x.dtype)


def rotate(x_TNH: Tensor, cos: Tensor, sin: Tensor, positions_T: Tensor) -> Tensor:
    """Rotary embedding in the half layout: dim j turns with dim j + d/2 (Su et al. 2021, arXiv:2104.09864).

    cos, sin: (positions, d/2) in x's dtype or in fp32, as `Rope.tables` makes them. Dims beyond d pass through. Written over whole
    heads, so that the compiler makes one kernel of it and the norm before it.
    """
    half = cos.shape[-1]
    turned_TNd, rest = x_TNH.split((2 * half, x_TNH.shape[-1] - 2 * half), dim=-1)
    partner_TNd = turned_TNd.unflatten(-1, (2, half)).flip(-2).flatten(-2)
    sign_d = torch.where(torch.arange(2 * half, device=sin.device) < half, -1, 1).to(sin.dtype)
    cos_T1d, sin_T1d = (table[positions_T].repeat(1, 2).unsqueeze(1) for table in (cos, sin))
    turned_TNd = (turned_TNd * cos_T1d + partner_TNd * (sin_T1d * sign_d)).to(x_TNH.dtype)
    return turned_TNd if rest.shape[-1] == 0 else torch.cat((turned_TNd, rest), dim=-1)


def rotate_pairs(x_TNH: Tensor, cos: Tensor, sin: Tensor, positions_T: Tensor) -> Tensor:
    """As `rotate` in the layout of pairs: dim 2j turns with dim 2j + 1."""
    half = cos.shape[-1]
    turned_TNd, rest = x_TNH.split((2 * half, x_TNH.shape[-1] - 2 * half), dim=-1)
    pairs_TNd2 = turned_TNd.unflatten(-1, (half, 2))
    partner_TNd = torch.stack((-pairs_TNd2[..., 1], pairs_TNd2[..., 0]), dim=-1).flatten(-2)
    cos_T1d, sin_T1d = (table[positions_T].repeat_interleave(2, dim=-1).unsqueeze(1) for table in (cos, sin))
    turned_TNd = (turned_TNd * cos_T1d + partner_TNd * sin_T1d).to(x_TNH.dtype)
    return turned_TNd if rest.shape[-1] == 0 else torch.cat((turned_TNd, rest), dim=-1)


def widen(x: Tensor, width: int) -> Tensor:
    """Heads with zeros behind them, up to `width`."""
    return F.pad(x, (0, width - x.shape[-1]))


def clip(x: Tensor, limit: float) -> Tensor:
    """x clamped to the limit on both sides; a limit of 0 is off."""
    return x.clamp(-limit, limit) if limit else x


def scale_queries(
    q_TNH: Tensor, positions_T: Tensor, beta: float, length: int, offset: int, fp32: bool = False
) -> Tensor:
    """q * (1 + beta * log(1 + floor((position + offset) / length))), in fp32 or by the factor in q's dtype."""
    factor_T11 = (1 + beta * torch.log1p(torch.floor((positions_T + offset) / length)))[:, None, None]
    return (q_TNH * (factor_T11 if fp32 else factor_T11.to(q_TNH.dtype))).to(q_TNH.dtype)


def relu2(x: Tensor) -> Tensor:
    """The square of relu."""
    return F.relu(x).square()


def gelu_new(x: Tensor) -> Tensor:
    """`gelu_tanh` written out, rounded after each operation (transformers' NewGELUActivation)."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x)."""
    return x * torch.sigmoid(1.702 * x)


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """xIELU (Huang and Schlag 2024, arXiv:2411.13010): a parabola above 0, an integral of ELU below; weights hold the alphas."""
    rising, falling = F.softplus(alpha_p), beta + F.softplus(alpha_n)
    below = (torch.expm1(torch.minimum(x, eps)) - x) * falling + beta * x
    return torch.where(x > 0, rising * x * x + beta * x, below)


def softcap(x: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(x / cap); a cap of None or 0 is off."""
    return torch.tanh(x / cap) * cap if cap else x


def rounded(value: float, dtype: torch.dtype) -> float:
    """The number as the model's dtype holds it, for scales that a family keeps as a tensor of that dtype."""
    return float(torch.tensor(value, dtype=dtype))
