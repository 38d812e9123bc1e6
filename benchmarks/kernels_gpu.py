"""Every Triton kernel at real shapes on a CUDA device: checked against its reference, then timed.

    python benchmarks/kernels_gpu.py [attention experts delta] [--json out.json]

The error is |kernel - reference| over |reference| (norms), against the same arithmetic in fp32 on the host or device; a
kernel above its limit is marked and the exit code is 1. The share is of an H200's 4.15 TB/s, over the bytes that must be
read (and, for the delta rule, written).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from timing import seconds

from flexgen.bench.bound import H200_BYTES_PER_SECOND
from flexgen.contract.state import Pages
from flexgen.runtime.ops import attention, recurrent
from flexgen.runtime.ops import expert_backends as moe
from flexgen.runtime.ops.experts import top_k
from flexgen.runtime.ops.kernels import paged_attention, paged_decode
from flexgen.runtime.ops.kernels.delta_rule import delta_step
from flexgen.runtime.ops.kernels.experts import route_outputs

DEVICE = torch.device("cuda")
LIMIT = 1e-2
DATA_SETS = 4
PAGE = 16


def error(result: torch.Tensor, expected: torch.Tensor) -> float:
    result, expected = result.float(), expected.to(result.device).float()
    return ((result - expected).norm() / expected.norm()).item()


# name, query heads, key/value heads, width, window, sinks, softcap
ATTENTIONS = [
    ("llama-8b", 32, 8, 128, None, False, None),
    ("qwen3-30b-a3b", 32, 4, 128, None, False, None),
    ("gpt-oss-20b full", 64, 8, 64, None, True, None),
    ("gpt-oss-20b window", 64, 8, 64, 128, True, None),
    ("gemma4 full", 16, 2, 512, None, False, None),
    ("gemma4 window", 16, 8, 256, 1024, False, None),
    ("qwen3.6 full", 16, 2, 256, None, False, None),
    ("odd group, width 80, cap", 20, 4, 80, None, False, 50.0),
]
# tokens of this step and length of each row
BATCHES = {
    "decode 1x1024": [(1, 1024)],
    "decode 8x1024": [(1, 1024)] * 8,
    "decode 48x256": [(1, 256)] * 48,
    "decode 48x1024": [(1, 1024)] * 48,
    "decode 256x640": [(1, 640)] * 256,
    "decode 64x4096": [(1, 4096)] * 64,
    "decode 16x16384": [(1, 16384)] * 16,
    "decode 32768 and 60x512": [(1, 32768)] + [(1, 512)] * 60,
    "decode uneven": [(1, 37 * n + 1) for n in range(64)],
    "prefill 4x2048": [(2048, 2048)] * 4,
    "mixed": [(1, 700)] * 32 + [(512, 1536), (77, 77)],
}


def paged(rows: list[tuple[int, int]], kv_heads: int, width: int) -> tuple[torch.Tensor, ...]:
    """k_pages, v_pages, table, starts, lengths; pages in random order, the unused ones NaN, the table 8 blocks wider."""
    blocks = [-(-length // PAGE) for _, length in rows]
    order = (torch.randperm(sum(blocks), device=DEVICE) + 1).int()
    table = torch.zeros(len(rows), max(blocks) + 8, dtype=torch.int32, device=DEVICE)
    for row, pages in enumerate(order.split(blocks)):
        table[row, : len(pages)] = pages
    pools = torch.randn(2, sum(blocks) + 1, PAGE, kv_heads, width, device=DEVICE).bfloat16()
    pools[:, 0] = float("nan")
    starts = torch.tensor([0, *(count for count, _ in rows)], device=DEVICE).cumsum(0).int()
    lengths = torch.tensor([length for _, length in rows], device=DEVICE).int()
    return pools[0], pools[1], table, starts, lengths


def attention_cases() -> Iterator[dict]:
    for name, heads, kv_heads, width, window, sunk, cap in ATTENTIONS:
        for batch, rows in BATCHES.items():
            tokens = sum(count for count, _ in rows)
            sinks = torch.randn(heads, device=DEVICE).bfloat16() if sunk else None
            scale, sets = width**-0.5, []
            for _ in range(DATA_SETS):
                q = torch.randn(tokens, heads, width, device=DEVICE).bfloat16()
                sets.append((q, attention.Keys(*paged(rows, kv_heads, width), None)))
            q, keys = sets[0]
            scoring = attention.Scoring(scale, window, sinks, cap, True)
            exact = attention.Scoring(scale, window, None if sinks is None else sinks.float(), cap, True)
            wide = (q.float(), keys.k_pages.float(), keys.v_pages.float())
            placed = (keys.table_RB, keys.starts_R, keys.lengths_R)
            expected = attention.attend_rows(attention.reference, *wide, *placed, exact)
            kernel = paged_decode if tokens == len(rows) else paged_attention
            if kernel is paged_decode:  # as an engine does, once a step
                pages = Pages(kv_heads, width, window)
                sets = [(q, replace(k, split=attention.plan_split(k.lengths_R, k.table_RB, PAGE, pages, q.dtype))) for q, k in sets]
            result = kernel.attend(*sets[0], scoring)
            keys = sum(length if window is None else min(length, window + count - 1) for count, length in rows)
            taken = seconds([partial(kernel.attend, *data, scoring) for data in sets], DEVICE)
            moved = keys * kv_heads * width * 2 * 2 + 2 * q.nbytes
            yield {"kernel": "attention", "shape": f"{name}, {batch}", "error": error(result, expected)} | {
                "microseconds": taken * 1e6,
                "bandwidth_share": moved / taken / H200_BYTES_PER_SECOND,
            }


# name, experts, top-k, D, I, layout, interleaved, biases, gate
EXPERTS = [
    ("qwen3-30b-a3b", 128, 8, 2048, 768, "out_in", False, False, moe.Gate()),
    ("gpt-oss-20b", 32, 4, 2880, 2880, "in_out", True, True, moe.Gate(alpha=1.702, limit=7.0, up_offset=1.0)),
    ("gemma4-26b-a4b", 128, 8, 2816, 704, "out_in", False, False, moe.Gate("gelu_tanh")),
    ("qwen3.6-35b-a3b", 256, 8, 2048, 512, "out_in", False, False, moe.Gate()),
]
TOKENS = [1, 2, 8, 16, 32, 48, 64, 128, 256]


def expert_weights(count, width, inner, layout, interleaved, biased) -> moe.ExpertWeights:
    shapes = [(count, 2 * inner, width), (count, width, inner)]
    if layout == "in_out":
        shapes = [(count, width, 2 * inner), (count, inner, width)]
    gate_up, down = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) * 0.02 for shape in shapes)
    biases = [None, None]
    if biased:
        biases = [torch.randn(count, size, device=DEVICE).bfloat16() for size in (2 * inner, width)]
    return moe.ExpertWeights(gate_up, down, layout, interleaved, *biases)


def moe_layer(x, weights_TK, experts_TK, *, weights: moe.ExpertWeights, gate: moe.Gate) -> torch.Tensor:
    return (route_outputs(x, experts_TK, weights, gate) * weights_TK[..., None]).float().sum(1)


def expert_cases() -> Iterator[dict]:
    for name, count, k, width, inner, layout, interleaved, biased, gate in EXPERTS:
        weights = expert_weights(count, width, inner, layout, interleaved, biased)
        wide = moe.ExpertWeights(*(x.float() if isinstance(x, torch.Tensor) else x for x in vars(weights).values()))
        for tokens in TOKENS:
            sets = []
            for _ in range(DATA_SETS):
                routes = top_k(torch.randn(tokens, count, device=DEVICE).softmax(-1), k)
                sets.append((torch.randn(tokens, width, device=DEVICE).bfloat16(), *routes))
            x, *routes = sets[0]
            run = partial(moe_layer, weights=weights, gate=gate)
            result = run(x, *routes)
            expected = (moe.each(x.float(), routes[1], wide, gate) * routes[0][..., None]).sum(1)
            taken = seconds([partial(run, *data) for data in sets], DEVICE)
            touched = sum(len(chosen.unique()) for *_, chosen in sets) / DATA_SETS
            moved = touched * (weights.gate_up[0].nbytes + weights.down[0].nbytes)
            shape = f"{name}, {tokens} tokens, {touched:.0f} experts"
            yield {"kernel": "experts", "shape": shape, "error": error(result, expected)} | {
                "microseconds": taken * 1e6,
                "bandwidth_share": moved / taken / H200_BYTES_PER_SECOND,
            }


def delta_inputs(rows, key_heads, value_heads, key, value) -> tuple[torch.Tensor, ...]:
    q, k = torch.randn(2, rows, key_heads, key, device=DEVICE).bfloat16()
    v = torch.randn(rows, value_heads, value, device=DEVICE).bfloat16()
    g, beta = torch.rand(2, rows, value_heads, device=DEVICE)
    return q, k, v, -g, beta.bfloat16()


def delta_cases() -> Iterator[dict]:
    key_heads, value_heads, key, value = 16, 32, 128, 128
    for rows in (1, 8, 48, 256):
        state = torch.randn(DATA_SETS * rows + 1, value_heads, key, value, device=DEVICE)
        slots = (torch.randperm(DATA_SETS * rows, device=DEVICE) + 1).split(rows)
        sets = [delta_inputs(rows, key_heads, value_heads, key, value) for _ in slots]
        expected_state = state.clone()
        q, k, v, g, beta = sets[0]
        unit = recurrent._unit_heads(q, k, value_heads)
        expected = recurrent.recurrent_rule(*unit, v.float(), g, beta.float(), expected_state, slots[0])
        result = delta_step(*sets[0], state, slots[0])
        worst = max(error(result, expected), error(state, expected_state))
        taken = seconds([partial(delta_step, *data, state, at) for data, at in zip(sets, slots)], DEVICE)
        moved = 2 * rows * value_heads * key * value * 4
        yield {"kernel": "delta rule", "shape": f"qwen3.6, {rows} rows", "error": worst} | {
            "microseconds": taken * 1e6,
            "bandwidth_share": moved / taken / H200_BYTES_PER_SECOND,
        }


CASES = {"attention": attention_cases, "experts": expert_cases, "delta": delta_cases}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", default=list(CASES), help=f"which of {', '.join(CASES)} (default: all)")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    if unknown := set(options.kernels) - CASES.keys():
        parser.error(f"unknown kernels {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if not torch.cuda.is_available():
        print("kernels_gpu: no CUDA device", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    rows = []
    print(f"{'kernel':<11} {'shape':<46} {'error':>8} {'us':>9} {'share':>6}")
    for kernel in options.kernels:
        for row in CASES[kernel]():
            rows.append(row)
            verdict = "" if row["error"] < LIMIT else "  WRONG"
            print(
                f"{row['kernel']:<11} {row['shape']:<46} {row['error']:8.1e} {row['microseconds']:9.1f} "
                f"{row['bandwidth_share']:6.1%}{verdict}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    wrong = sum(not row["error"] < LIMIT for row in rows)
    print(f"{len(rows)} cases, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
