"""Attention over paged keys and values: one function for every family, with backends behind it.

Key j is visible to query i iff j <= i and, under a window, i - window < j. Nothing that is not visible to some query of
its row is ever read, so pages behind a window may hold anything, NaN included.

Shape suffixes: T tokens of the step, t tokens of one row, L keys of one row, N query heads, K key/value heads, H head
width, P pages, S tokens of a page, R rows, B blocks of a block table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen.contract.abi import Layer, PageStep, Step
from flexgen.contract.state import Pages
from flexgen.runtime.ops.elementwise import softcap as cap_scores
from flexgen.runtime.ops.library import define_op, flat


def write_pages(w: Layer, k_TKH: Tensor, v_TKH: Tensor, pages: PageStep) -> None:
    """Write each token's key and value to its slot. Plain indexing, which the compiler fuses with rope and norm."""
    page_size = w.k_pages.shape[1]
    page_T, offset_T = pages.slots_T // page_size, pages.slots_T % page_size
    w.k_pages[page_T, offset_T] = k_TKH
    w.v_pages[page_T, offset_T] = v_TKH


def attend(
    q_TNH: Tensor,
    w: Layer,
    pages: PageStep,
    step: Step,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    alibi: float | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    softmax_fp32: bool = True,
) -> Tensor:
    """Attention of each query over its row's pages, (T, N, H); this step's keys must have been written.

    chunk         positions are cut into chunks of this length: a query sees no key of an earlier one (llama 4)
    alibi         what the slopes of linear biases are multiplied by (Press et al. 2021, arXiv:2108.12409)
    sinks         (N,) one more logit a head, which takes weight and gives no value (gpt_oss)
    softcap       bounds the scaled scores (gemma 2)
    softmax_fp32  False: softmax in the model's dtype, as gpt_oss does; backends on a GPU are at least as exact
    Tokens that no row owns come out as zeros, except in a decode step, where every token is a row.
    """
    keys = Keys(w.k_pages, w.v_pages, pages.table_RB, step.starts_R, step.lengths_R, pages.split)
    return torch.ops.flexgen.attend(q_TNH, *flat(keys), *flat(Scoring(scale, window, sinks, softcap, softmax_fp32, chunk, alibi)))


def plan_split(lengths_R: Tensor, table_RB: Tensor, page_size: int, pages: Pages, dtype: torch.dtype) -> Tensor | None:
    """How the keys of a decode step are split among programs (`PageStep.split`); None where nothing is split: on a host."""
    if not lengths_R.is_cuda:
        return None
    from flexgen.runtime.ops.kernels import paged_decode  # Triton is there where CUDA is

    keys, size = table_RB.shape[1] * page_size, (pages.kv_heads, pages.head_dim, dtype.itemsize)
    split = paged_decode.Split.of(len(lengths_R), keys, *size, pages.window, lengths_R.device)
    return paged_decode.plan(lengths_R, split, pages.window)


@dataclass(frozen=True)
class Scoring:
    """What turns q k^T into weights, constant for a layer kind."""

    scale: float
    window: int | None
    sinks: Tensor | None
    softcap: float | None
    softmax_fp32: bool
    chunk: int | None = None
    alibi: float | None = None

    @property
    def reach(self) -> int | None:
        """Keys that a query can see at most, itself included; None: all."""
        return min((limit for limit in (self.window, self.chunk) if limit is not None), default=None)


def alibi_slopes(heads: int) -> Tensor:
    """One slope a head, (N,): powers of 2 ** -(8 / n) for the largest power of two n of heads, those between for the rest."""
    even = 2 ** (heads.bit_length() - 1)
    exponents = [8 * (head + 1) / even for head in range(even)]
    exponents += [8 * (2 * head + 1) / (2 * even) for head in range(heads - even)]
    return 2.0 ** -torch.tensor(exponents)


RowAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Scoring], Tensor]
"""(q_NtH, k_KLH, v_KLH, visible_tL, scoring) -> o_NtH"""


def reference(q_NtH: Tensor, k_KLH: Tensor, v_KLH: Tensor, visible_tL: Tensor, scoring: Scoring) -> Tensor:
    """Every operation and cast written out, in the order of transformers' eager attention."""
    group = q_NtH.shape[0] // k_KLH.shape[0]
    k_NLH, v_NLH = k_KLH.repeat_interleave(group, dim=0), v_KLH.repeat_interleave(group, dim=0)
    scores_NtL = cap_scores(q_NtH @ k_NLH.transpose(1, 2) * scoring.scale, scoring.softcap)
    if scoring.alibi is not None:
        slopes_N = alibi_slopes(len(scores_NtL)).to(scores_NtL) * scoring.alibi
        back_L = torch.arange(1 - scores_NtL.shape[2], 1, device=scores_NtL.device)
        scores_NtL = scores_NtL + slopes_N[:, None, None] * back_L
    scores_NtL = scores_NtL.masked_fill(~visible_tL, float("-inf"))
    if scoring.sinks is not None:
        sink_Nt1 = scoring.sinks[:, None, None].expand(-1, scores_NtL.shape[1], 1)
        scores_NtL = torch.cat((scores_NtL, sink_Nt1.to(scores_NtL.dtype)), dim=-1)
    if scoring.softmax_fp32:
        weights_NtL = F.softmax(scores_NtL, dim=-1, dtype=torch.float32).to(q_NtH.dtype)
    else:
        weights_NtL = F.softmax(scores_NtL - scores_NtL.amax(dim=-1, keepdim=True), dim=-1)
    return weights_NtL[..., : k_NLH.shape[1]] @ v_NLH


def sdpa(q_NtH: Tensor, k_KLH: Tensor, v_KLH: Tensor, visible_tL: Tensor, scoring: Scoring) -> Tensor:
    """torch's scaled_dot_product_attention, which has neither sinks nor a cap."""
    o_1NtH = F.scaled_dot_product_attention(
        q_NtH[None], k_KLH[None], v_KLH[None], attn_mask=visible_tL, scale=scoring.scale, enable_gqa=True
    )
    return o_1NtH[0]


@dataclass(frozen=True)
class Backend:
    """One way to attend on a host, and what it serves."""

    run: RowAttention
    dtypes: tuple[torch.dtype, ...] | None
    sinks: bool
    softcap: bool
    model_softmax: bool
    alibi: bool

    def serves(self, dtype: torch.dtype, scoring: Scoring) -> bool:
        return (
            (self.dtypes is None or dtype in self.dtypes)
            and (self.sinks or scoring.sinks is None)
            and (self.softcap or scoring.softcap is None)
            and (self.model_softmax or scoring.softmax_fp32)
            and (self.alibi or scoring.alibi is None)
        )


CPU_BACKENDS = (
    Backend(sdpa, dtypes=(torch.float32, torch.float64), sinks=False, softcap=False, model_softmax=False, alibi=False),
    Backend(reference, dtypes=None, sinks=True, softcap=True, model_softmax=True, alibi=True),
)
"""The first that serves is taken; in 16 bits only the reference rounds where transformers does.

On CUDA Triton kernels serve all, `kernels/paged_decode.py` decode steps and `kernels/paged_attention.py` the rest:
FlexAttention reached 2.1 of 4.15 TB/s in decode, takes no group of heads that is not a power of two (pytorch#151359), and
its FLASH backend breaks sinks (pytorch#181645).
"""


def choose(dtype: torch.dtype, scoring: Scoring) -> RowAttention:
    """The backend for tensors on the host."""
    return next(backend.run for backend in CPU_BACKENDS if backend.serves(dtype, scoring))


def _rows(starts_R: Tensor, lengths_R: Tensor) -> Iterator[tuple[int, int, int, int]]:
    """(row, start, stop, length) of each row that has tokens."""
    starts, lengths = starts_R.tolist(), lengths_R.tolist()
    for row, length in enumerate(lengths):
        if starts[row] < starts[row + 1]:
            yield row, starts[row], starts[row + 1], length


def attend_rows(
    run: RowAttention,
    q_TNH: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table_RB: Tensor,
    starts_R: Tensor,
    lengths_R: Tensor,
    scoring: Scoring,
) -> Tensor:
    """A row at a time on the host: gather the pages that hold visible keys, then `run`."""
    page_size = k_pages.shape[1]
    o_TNH = torch.zeros_like(q_TNH)
    for row, start, stop, length in _rows(starts_R, lengths_R):
        first_query = length - (stop - start)
        first = 0 if scoring.reach is None else max(0, first_query - scoring.reach + 1)
        first_page = first // page_size
        taken = table_RB[row, first_page : -(-length // page_size)].long()
        within = slice(first - first_page * page_size, length - first_page * page_size)
        k_KLH, v_KLH = (pool[taken].flatten(0, 1)[within].transpose(0, 1) for pool in (k_pages, v_pages))
        queries = torch.arange(first_query, length, device=q_TNH.device)[:, None]
        keys = torch.arange(first, length, device=q_TNH.device)
        visible_tL = keys <= queries
        if scoring.window is not None:
            visible_tL &= keys > queries - scoring.window
        if scoring.chunk is not None:
            visible_tL &= keys >= queries // scoring.chunk * scoring.chunk
        o_NtH = run(q_TNH[start:stop].transpose(0, 1), k_KLH, v_KLH, visible_tL, scoring)
        o_TNH[start:stop] = o_NtH.transpose(0, 1)
    return o_TNH


@dataclass(frozen=True)
class Keys:
    """Where the keys and values of a step's rows lie; all but the pools are as in `PageStep` and `Step`."""

    k_pages: Tensor
    v_pages: Tensor
    table_RB: Tensor
    starts_R: Tensor
    lengths_R: Tensor
    split: Tensor | None


def _attend_cpu(q_TNH: Tensor, keys: Keys, scoring: Scoring) -> Tensor:
    pools = (keys.k_pages, keys.v_pages, keys.table_RB, keys.starts_R, keys.lengths_R)
    return attend_rows(choose(q_TNH.dtype, scoring), q_TNH, *pools, scoring)


def _attend_cuda(q_TNH: Tensor, keys: Keys, scoring: Scoring) -> Tensor:
    """The kernels' softmax is fp32 throughout, which is at least as exact as what `softmax_fp32=False` asks."""
    from flexgen.runtime.ops.kernels import paged_attention, paged_decode  # Triton is there where CUDA is

    is_decode = len(q_TNH) == len(keys.table_RB)
    return (paged_decode if is_decode else paged_attention).attend(q_TNH, keys, scoring)


define_op("attend", cpu=_attend_cpu, cuda=_attend_cuda, fake=lambda q_TNH, *_: torch.empty_like(q_TNH))
