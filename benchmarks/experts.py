"""The expert function alone: time and share of the read bandwidth of each backend, by tokens and experts.

    python benchmarks/experts.py [--device cuda] [--tokens 1 8 64] [--json out.json]

The share counts the weights of the experts that the routes touch, once, over what the device can read. On a host the
matrices are smaller (`--width`, `--inner`), since the loop's arithmetic dominates there.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from timing import read_bandwidth, seconds

from flexgen.runtime.ops import expert_backends as moe
from flexgen.runtime.ops.experts import top_k

TOKENS = [1, 2, 4, 8, 16, 32, 48, 64, 128, 256, 512, 1024, 2048, 4096]
ROUTE_SETS = 4


def make_weights(count: int, width: int, inner: int, layout: str, device: torch.device) -> moe.ExpertWeights:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shapes = [(count, 2 * inner, width), (count, width, inner)]
    if layout == "in_out":
        shapes = [(count, width, 2 * inner), (count, inner, width)]
    gate_up, down = (torch.randn(shape, device=device, dtype=dtype) * 0.02 for shape in shapes)
    return moe.ExpertWeights(gate_up, down, layout, interleaved=layout == "in_out")


def backends(device: torch.device, tokens: int) -> dict[str, tuple[moe.Backend, bool]]:
    """Name to (backend, whether it can be captured)."""
    found = {"each": (moe.each, False), "grouped_mm": (moe.grouped, True)}
    if device.type == "cuda" and tokens <= moe.ROUTED_TOKENS:
        found["triton"] = (moe.routed, True)
    return found


def measure(weights: moe.ExpertWeights, tokens: int, k: int, bandwidth: float) -> list[dict]:
    """One row a backend: milliseconds, distinct experts touched, share of the bandwidth."""
    device, (count, *_), gate = weights.gate_up.device, weights.gate_up.shape, moe.Gate()
    width = weights.down.shape[1 if weights.layout == "out_in" else 2]
    inputs = []
    for _ in range(ROUTE_SETS):
        _, experts = top_k(torch.randn(tokens, count, device=device).softmax(-1), k)
        inputs.append((torch.randn(tokens, width, device=device).to(weights.gate_up.dtype), experts))
    touched = sum(len(experts.unique()) for _, experts in inputs) / ROUTE_SETS
    one_expert = weights.gate_up[0].nbytes + weights.down[0].nbytes
    rows = []
    for name, (run, captured) in backends(device, tokens).items():
        calls = [lambda data=data, run=run: run(*data, weights, gate) for data in inputs]
        taken = seconds(calls, device, captured=captured, repeats=20 if name != "each" else 3)
        share = touched * one_expert / taken / bandwidth
        rows.append(
            {"experts": count, "layout": weights.layout, "tokens": tokens, "backend": name}
            | {"milliseconds": taken * 1e3, "touched": touched, "bandwidth_share": share}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--experts", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--width", type=int, help="D (default: 2048 on a GPU, 256 on a host)")
    parser.add_argument("--inner", type=int, help="I (default: 768 on a GPU, 96 on a host)")
    parser.add_argument("--layout", choices=["out_in", "in_out"], default="out_in")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    device = torch.device(options.device)
    sizes = (2048, 768) if device.type == "cuda" else (256, 96)
    width, inner = options.width or sizes[0], options.inner or sizes[1]
    torch.manual_seed(0)
    bandwidth = read_bandwidth(device)
    print(f"D {width}, I {inner}, top-{options.top_k}, {options.layout}; read bandwidth {bandwidth / 1e12:.3f} TB/s")
    print(f"{'experts':>7} {'tokens':>6} {'touched':>7} {'backend':>11} {'ms':>9} {'share':>6}")
    rows = []
    for count in options.experts:
        weights = make_weights(count, width, inner, options.layout, device)
        for tokens in options.tokens:
            for row in measure(weights, tokens, options.top_k, bandwidth):
                rows.append(row)
                print(
                    f"{count:7} {tokens:6} {row['touched']:7.1f} {row['backend']:>11} "
                    f"{row['milliseconds']:9.4f} {row['bandwidth_share']:6.1%}",
                    flush=True,
                )
    if options.json:
        options.json.write_text(json.dumps({"device": options.device, "bytes_per_second": bandwidth, "rows": rows}))


if __name__ == "__main__":
    main()
