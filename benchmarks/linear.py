"""Matrix products of a few tokens: this project's kernel in many sizes beside cuBLAS, each after a small kernel.

    python benchmarks/linear.py [--json out.json] [--tokens 8 32 64]

Times are of the pair (a copy of the tokens, then the product) in a CUDA graph over weights that no cache holds, since a
step never multiplies twice in a row and a kernel that begins early gains only beside another one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from timing import read_bandwidth, seconds

from flexgen.runtime.kernels.launch import CHAIN, await_previous
from flexgen.runtime.kernels.linear import Launch, linear

SHAPES = (
    (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336),  # llama-8b
    (19456, 2560), (2560, 9728),  # qwen3-4b
    (5120, 2048), (2048, 4096), (128, 2048),  # qwen3-30b-a3b
    (12352, 2048), (1024, 2048), (2048, 512), (1, 2048),  # qwen3.6-35b-a3b
    (8192, 2816), (4224, 2816),  # gemma4-26b-a4b
)  # fmt: skip
SIZES = {
    16: (
        (16, 256, 4, 4), (16, 256, 2, 4), (16, 512, 4, 3), (16, 128, 4, 6), (16, 128, 2, 6), (32, 128, 4, 6), (32, 256, 4, 4),
        (64, 128, 4, 4),
    ),
    32: ((16, 256, 4, 4), (16, 128, 4, 6), (16, 128, 2, 6), (32, 128, 4, 5), (32, 256, 4, 3), (64, 128, 4, 4)),
    64: (
        (16, 128, 4, 4), (16, 256, 4, 3), (32, 128, 4, 4), (32, 64, 4, 6), (32, 256, 4, 3), (64, 128, 4, 4), (64, 64, 4, 6),
        (128, 64, 4, 5),
    ),
}  # fmt: skip
"""BLOCK_T to (BLOCK_O, BLOCK_D, warps, stages)."""
AHEAD = (0, 512, 2048)
WORKERS = 12


@triton.jit
def _copy_kernel(x, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    await_previous()
    tl.store(out + at, tl.load(x + at, mask=at < size), mask=at < size)


def copied(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    _copy_kernel[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), BLOCK=1024, **CHAIN)
    return out


def launches(tokens: int, width: int) -> list[Launch]:
    block_t = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    return [
        Launch(block_t, block_o, block_d, ahead, warps, stages)
        for (block_o, block_d, warps, stages), ahead in itertools.product(SIZES[block_t], AHEAD)
        if ahead <= width
    ]


def build(part: int, tokens: list[int]) -> None:
    """Compile a share of the kernels into Triton's cache."""
    every = [(t, w, launch) for t in tokens for w in (4096, 2816) for launch in launches(t, w)]
    for count, width, launch in every[part::WORKERS]:
        x, weight = (torch.zeros(n, width, dtype=torch.bfloat16, device="cuda") for n in (count, 256))
        linear(x, weight, None, launch)


def measure(features: int, width: int, tokens: int) -> list[dict]:
    copies = max(2, min(24, int(4e8 / (features * width * 2))))
    x = torch.randn(tokens, width, device="cuda").bfloat16()
    weights = [torch.randn(features, width, device="cuda").bfloat16() * width**-0.5 for _ in range(copies)]
    expected, device = F.linear(x.float(), weights[0].float()), x.device
    bytes_read = features * width * 2

    def row(method: str, run) -> dict:
        error = (run(x, weights[0]).float() - expected).norm() / expected.norm()
        taken = seconds([lambda w=w: run(copied(x), w) for w in weights], device, repeats=7)
        return {"features": features, "width": width, "tokens": tokens, "method": method, "us": taken * 1e6,
                "share": bytes_read / taken / read_bandwidth(device), "error": error.item()}  # fmt: skip

    rows = [row("cublas", F.linear)]
    for launch in launches(tokens, width):
        sizes = (launch.block_o, launch.block_d, launch.warps, launch.stages, launch.ahead)
        rows.append(row("x".join(map(str, sizes)), partial(lambda x, w, launch: linear(x, w, None, launch), launch=launch)))
    if tokens == 1:
        rows.append(row("one", lambda x, w: linear(x, w, None)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--json", type=Path, help="also write all rows to this file")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        return build(options.part, options.tokens)
    again = [sys.executable, __file__, "--tokens", *map(str, options.tokens)]
    workers = [subprocess.Popen([*again, "--part", str(part)]) for part in range(WORKERS)]
    assert not any(worker.wait() for worker in workers)
    found = []
    print(f"{'features':>8} {'width':>6} {'tokens':>6} {'cublas us':>10} {'best us':>8} {'share':>6}  sizes (the next two)")
    for (features, width), tokens in itertools.product(SHAPES, options.tokens):
        rows = measure(features, width, tokens)
        found += rows
        best = sorted((row for row in rows if row["method"] != "cublas"), key=lambda row: row["us"])[:3]
        wrong = "  WRONG" if max(row["error"] for row in rows) > 1e-2 else ""
        print(
            f"{features:8} {width:6} {tokens:6} {rows[0]['us']:10.2f} {best[0]['us']:8.2f} {best[0]['share']:6.0%}  "
            + ", ".join(f"{row['method']} {row['us']:.2f}" for row in best) + wrong,
            flush=True,
        )  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": found}, indent=1))


if __name__ == "__main__":
    main()
