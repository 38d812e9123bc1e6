"""Merging an adapter into stacked experts: what the engine runs, against its plain form and a loop over experts.

    python benchmarks/merge.py [--device cuda] [--rank 16] [--json out.json]

Milliseconds are those of one layer's gate_up and down together. The share is of the read bandwidth, over the base weights,
which must be read, and the merged ones, which must be written. They agree to rounding, which is checked first.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from timing import read_bandwidth, seconds

from flexgen.runtime.loading.lora import ExpertLowRank, merge_experts
from flexgen.runtime.ops.merge import merge_plain

# name, experts, D, I, transposed
SHAPES = [
    ("qwen3-30b-a3b", 128, 2048, 768, False),
    ("gpt-oss-20b", 32, 2880, 2880, True),
    ("qwen3.6-35b-a3b", 256, 2048, 512, False),
]
HOST_SHARE = 16
"""On a host, D and I are this much smaller."""


def loop(out: torch.Tensor, base: torch.Tensor, update: ExpertLowRank, transposed: bool) -> None:
    """The textbook: an expert after the other."""
    rank = update.a.shape[0] // update.experts
    a = update.a.float().view(update.experts, rank, -1)
    b = update.b.float().view(-1, rank, update.experts)
    for expert in range(update.experts):
        delta = update.scale * (b[..., expert] @ a[expert])
        out[expert] = (base[expert].float() + (delta.T if transposed else delta)).to(out.dtype)


def plain(out: torch.Tensor, base: torch.Tensor, update: ExpertLowRank, transposed: bool) -> None:
    out, base = (out.transpose(1, 2), base.transpose(1, 2)) if transposed else (out, base)
    merge_plain(out, base, [(update.scale, *update.factors())])


def served(out: torch.Tensor, base: torch.Tensor, update: ExpertLowRank, transposed: bool) -> None:
    merge_experts(out, base, "experts", (), {"experts": [update]}, transposed=transposed)


METHODS = {"served": served, "plain": plain, "loop": loop}


def measure(name: str, count: int, width: int, inner: int, transposed: bool, rank: int, device: torch.device) -> list[dict]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layer = []
    for rows, columns in ((2 * inner, width), (width, inner)):
        shape = (count, columns, rows) if transposed else (count, rows, columns)
        base = torch.randn(shape, device=device, dtype=dtype) * 0.02
        a = torch.randn(count * rank, columns, device=device) * 0.02
        b = torch.randn(rows, count * rank, device=device) * 0.02
        layer.append((torch.empty_like(base), base, ExpertLowRank(a, b, 2.0, count), transposed))
    found = []
    for run in METHODS.values():
        for part in layer:
            run(*part)
        found.append([part[0].clone() for part in layer])
    for first, *others in zip(*found):
        for other in others:
            torch.testing.assert_close(first, other)
    moved, bandwidth = 2 * sum(base.nbytes for _, base, *_ in layer), read_bandwidth(device)
    rows = []
    for method, run in METHODS.items():
        taken = seconds([lambda run=run: [run(*part) for part in layer]], device, captured=False)
        rows.append(
            {"shape": name, "experts": count, "width": width, "inner": inner, "rank": rank, "method": method}
            | {"milliseconds": taken * 1e3, "bandwidth_share": moved / taken / bandwidth}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    device, found = torch.device(options.device), []
    torch.manual_seed(0)
    print(f"{'shape':<16} {'E':>4} {'D':>5} {'I':>5} {'method':>8} {'ms a layer':>10} {'share':>6}")
    for name, count, width, inner, transposed in SHAPES:
        shrink = 1 if device.type == "cuda" else HOST_SHARE
        for row in measure(name, count, width // shrink, inner // shrink, transposed, options.rank, device):
            found.append(row)
            print(
                f"{row['shape']:<16} {row['experts']:4} {row['width']:5} {row['inner']:5} {row['method']:>8} "
                f"{row['milliseconds']:10.3f} {row['bandwidth_share']:6.1%}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps({"device": options.device, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
