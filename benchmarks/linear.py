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
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from timing import read_bandwidth, seconds

from flexgen.runtime.ops.kernels.launch import CHAIN, await_previous
from flexgen.runtime.ops.kernels.linear import Launch, linear_few, linear_one

SHAPES = (
    (2048, 4096), (5120, 2048), (128, 2048),  # qwen3-30b-a3b
    (12352, 2048), (1024, 2048), (2048, 512), (1, 2048),  # qwen3.6-35b-a3b
    (6144, 4096), (4096, 4096), (4096, 14336),  # llama-8b
    (8192, 2816), (4224, 2816), (2816, 4096), (2816, 2112),  # gemma4-26b-a4b
    (2560, 9728), (28672, 4096), (128256, 4096),
)  # fmt: skip
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


def launches(tokens: int, features: int, width: int) -> list[Launch]:
    sizes = itertools.product((1, 2, 4), (64, 128, 256))
    found = [Launch.of(tokens, features, width, torch.device("cuda"), s, d) for s, d in sizes if s * d <= width]
    return [launch for launch in dict.fromkeys(found) if launch.stages >= 2]


SINGLE = ((8, 512, 2), (4, 1024, 2), (8, 1024, 4), (2, 2048, 4), (1, 4096, 4), (2, 4096, 8))


def build(part: int, tokens: list[int]) -> None:
    """Compile a share of the kernels into Triton's cache."""
    kinds = {}
    for count, (features, width) in itertools.product([t for t in tokens if t > 1], SHAPES):
        for launch in launches(count, features, width):
            compiled = (launch.splits, launch.block_t, launch.block_o, launch.block_d, launch.ahead, launch.stages)
            kinds.setdefault((*compiled, width % launch.block_d == 0, launch.rows % 16 == 0), (count, features, width, launch))
    for count, features, width, launch in list(kinds.values())[part::WORKERS]:
        x, weight = (torch.zeros(n, width, dtype=torch.bfloat16, device="cuda") for n in (count, features))
        linear_few(x, weight, None, launch)
    if 1 in tokens:
        for width, sizes in list(itertools.product({width for _, width in SHAPES}, SINGLE))[part::WORKERS]:
            x, weight = (torch.zeros(n, width, dtype=torch.bfloat16, device="cuda") for n in (1, 256))
            linear_one(x, weight, None, sizes)


def measure(features: int, width: int, tokens: int) -> list[dict]:
    copies = max(2, min(16, int(3e8 / (features * width * 2))))
    x = torch.randn(tokens, width, device="cuda").bfloat16()
    weights = [torch.randn(features, width, device="cuda").bfloat16() * width**-0.5 for _ in range(copies)]
    expected, device = F.linear(x, weights[0]).float(), x.device
    bytes_read = features * width * 2

    def row(method: str, run) -> dict:
        error = (run(x, weights[0]).float() - expected).norm() / expected.norm()
        taken = seconds([lambda w=w: run(copied(x), w) for w in weights], device, repeats=5)
        return {"features": features, "width": width, "tokens": tokens, "method": method, "us": taken * 1e6,
                "share": bytes_read / taken / read_bandwidth(device), "error": error.item()}  # fmt: skip

    rows = [row("cublas", F.linear)]
    if tokens == 1:
        rows.append(row("one", lambda x, w: linear_one(x, w, None)))
        return rows + [row("x".join(map(str, sizes)), lambda x, w, sizes=sizes: linear_one(x, w, None, sizes)) for sizes in SINGLE]
    for launch in launches(tokens, features, width):
        name = f"{launch.rows}/{launch.splits} {launch.block_o}x{launch.block_d}x{launch.stages} +{launch.ahead}"
        rows.append(row(name, lambda x, w, launch=launch: linear_few(x, w, None, launch)))
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
    print(f"{'features':>8} {'width':>6} {'tokens':>6} {'cublas us':>10} {'best us':>8} {'share':>6}  three best")
    for (features, width), tokens in itertools.product(SHAPES, options.tokens):
        if features > 50000 and tokens > 1:
            continue
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
