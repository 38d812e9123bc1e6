"""The gated delta rule alone: the plain forms, Triton's and flash-linear-attention's, at the sizes of Qwen 3.6.

    python benchmarks/delta.py [--device cuda] [--sweep] [--json out.json]

`--sweep` instead compares the launches of Triton's kernels for prompts (`*`: what they choose) on a CUDA device, in less
than a minute.

The errors are |output - reference| and |state - reference| over |reference| (norms), against the plain chunked form in
float64; above the limit a method is marked and the exit code is 1. Methods that are not there are left out.

flash-linear-attention is measured for comparison. For a machine without a network, elsewhere:

    pip download --no-deps -d wheels flash-linear-attention fla-core einops
    pip install --no-deps --no-index --find-links wheels flash-linear-attention einops fla-core   # over there
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from timing import seconds

from flexgen.contract.abi import PAD_SLOT
from flexgen.runtime.ops import recurrent

LIMIT = 1e-2
KEY_HEADS, VALUE_HEADS, KEY, VALUE = 16, 32, 128, 128
# tokens of each row
PROMPTS = {
    "1 x 8192": [8192],
    "8 x 1024": [1024] * 8,
    "64 x 128": [128] * 64,
    "1 x 2048 and 48 decode": [2048] + [1] * 48,
}
DECODES = {"1 row": [1], "8 rows": [1] * 8, "48 rows": [1] * 48, "256 rows": [1] * 256}
HOST_CASES = ("8 x 1024", "8 rows")
# tokens of each row, and of rows of the padding slot after them
SWEPT = {
    "1 x 8192": ([8192], []),
    "8 x 1024": ([1024] * 8, []),
    "28 x 256": ([256] * 28, []),
    "64 x 12 of 256": ([12] * 64, [2] * 64 + [1] * 128),
}
# columns of the state, warps and stages, by tokens of a chunk; of 64, (32, 4, 1) makes Triton 3.6 read where nothing is
LAUNCHES = {
    64: [(32, 4, 2), (32, 4, 3), (64, 4, 1), (64, 4, 2), (64, 8, 1), (64, 8, 2), (128, 8, 1)],
    16: [(32, 4, 1), (64, 4, 1), (64, 8, 1), (128, 8, 1)],
}
SETS = 3

Method = Callable[..., torch.Tensor]


def plain_prefill(q, k, v, g, beta, state, starts, slots) -> torch.Tensor:
    wide = (*recurrent._unit_heads(q, k, VALUE_HEADS), v.float(), g, beta.float())
    return recurrent.chunked_rule(*wide, state, starts, slots).to(v.dtype)


def plain_decode(q, k, v, g, beta, state, starts, slots) -> torch.Tensor:
    wide = (*recurrent._unit_heads(q, k, VALUE_HEADS), v.float(), g, beta.float())
    return recurrent.recurrent_rule(*wide, state, slots).to(v.dtype)


def fla_prefill(q, k, v, g, beta, state, starts, slots) -> torch.Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    out, state[slots] = chunk_gated_delta_rule(
        *(x[None] for x in (q, k, v, g, beta)), initial_state=state[slots], output_final_state=True,
        use_qk_l2norm_in_kernel=True, cu_seqlens=starts.long(),
    )  # fmt: skip
    return out[0]


def fla_decode(q, k, v, g, beta, state, starts, slots) -> torch.Tensor:
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    out, state[slots] = fused_recurrent_gated_delta_rule(
        *(x[None] for x in (q, k, v, g)), beta=beta[None], initial_state=state[slots], output_final_state=True,
        use_qk_l2norm_in_kernel=True, cu_seqlens=starts.long(),
    )  # fmt: skip
    return out[0]


def methods(device: torch.device, decode: bool) -> dict[str, tuple[Method, bool]]:
    """Name to (method, whether it can be captured)."""
    found = {"plain": (plain_decode if decode else plain_prefill, decode)}
    if device.type == "cuda":
        from flexgen.runtime.ops.kernels.delta_rule import delta_prefill, delta_step

        step = lambda *inputs: delta_step(*inputs[:6], inputs[7])  # noqa: E731
        found["triton"] = (step if decode else delta_prefill, True)
        if find_spec("fla") is not None:
            found["fla"] = (fla_decode if decode else fla_prefill, False)
    return found


def inputs_of(counts: list[int], device: torch.device, pads: list[int] | None = None) -> tuple[torch.Tensor, ...]:
    pads = pads or []
    slots = torch.tensor([*range(1, len(counts) + 1), *[PAD_SLOT] * len(pads)], device=device)
    counts = counts + pads
    tokens, dtype = sum(counts), torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k = torch.randn(2, tokens, KEY_HEADS, KEY, device=device).to(dtype)
    v = torch.randn(tokens, VALUE_HEADS, VALUE, device=device).to(dtype)
    g = -torch.rand(tokens, VALUE_HEADS, device=device) * 0.2
    beta = torch.rand(tokens, VALUE_HEADS, device=device).to(dtype)
    state = torch.randn(len(counts) + 1, VALUE_HEADS, KEY, VALUE, device=device) * 0.1
    starts = torch.tensor([0, *counts], device=device).cumsum(0).int()
    return q, k, v, g, beta, state, starts, slots


def exact(q, k, v, g, beta, state, starts, slots) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, state) in float64."""
    q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, state))
    q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    group = VALUE_HEADS // KEY_HEADS
    wide = ((q * KEY**-0.5).repeat_interleave(group, 1), k.repeat_interleave(group, 1), v, g, beta)
    return recurrent.chunked_rule(*wide, state, starts, slots), state


def distance(result: torch.Tensor, expected: torch.Tensor) -> float:
    return ((result.double() - expected).norm() / expected.norm()).item()


def measure(name: str, counts: list[int], device: torch.device) -> list[dict]:
    sets, rows = [inputs_of(counts, device) for _ in range(SETS)], []
    wanted, wanted_state = exact(*sets[0])
    decode, initial = max(counts) == 1, sets[0][5].clone()  # timed runs change the sets' states
    for method, (run, captured) in methods(device, decode).items():
        state = initial.clone()
        result = run(*sets[0][:5], state, *sets[0][6:])
        errors = distance(result, wanted), distance(state, wanted_state)
        taken = seconds([partial(run, *each) for each in sets], device, captured=captured, repeats=10)
        rows.append(
            {"phase": "decode" if decode else "prefill", "rows": name, "method": method}
            | {"microseconds": taken * 1e6, "output_error": errors[0], "state_error": errors[1]}
        )
    return rows


def sweep(device: torch.device) -> Iterator[dict]:
    """Every launch on every shape that its chunks are meant for."""
    from triton.runtime.errors import OutOfResources

    from flexgen.runtime.ops.kernels.delta_rule import Launch, delta_prefill

    launches = {chunk: [Launch(chunk, *sizes) for sizes in each] for chunk, each in LAUNCHES.items()}
    small = inputs_of([1], device)

    def fits(launch: Launch) -> bool:
        try:
            delta_prefill(*small, launch)
        except OutOfResources:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:  # compile
        every = [launch for each in launches.values() for launch in each]
        fitting = {launch for launch, fit in zip(every, threads.map(fits, every)) if fit}
    for name, (counts, pads) in SWEPT.items():
        sets, live = [inputs_of(counts, device, pads) for _ in range(SETS)], sum(counts)
        wanted, wanted_state = exact(*sets[0])
        chosen, initial = Launch.of(sets[0][0], sets[0][2], len(sets[0][7])), sets[0][5].clone()
        for launch in dict.fromkeys((chosen, *launches[chosen.chunk])):
            if launch not in fitting and launch != chosen:
                continue
            state = initial.clone()
            result = delta_prefill(*sets[0][:5], state, *sets[0][6:], launch)
            taken = seconds([partial(delta_prefill, *each, launch) for each in sets], device, repeats=10)
            yield {
                "rows": name, **vars(launch), "chosen": launch == chosen, "microseconds": taken * 1e6,
                "output_error": distance(result[:live], wanted[:live]),
                "state_error": distance(state[1:], wanted_state[1:]),
            }  # fmt: skip


def print_sweep(device: torch.device) -> list[dict]:
    print(f"{'rows':<16} {'chunk':>5} {'block_v':>7} {'warps':>5} {'stages':>6} {'us':>10} {'output':>8} {'state':>8}")
    found = []
    for row in sweep(device):
        found.append(row)
        wrong = not max(row["output_error"], row["state_error"]) < LIMIT
        print(
            f"{row['rows']:<16} {row['chunk']:5} {row['block_v']:7} {row['warps']:5} {row['stages']:6} "
            f"{row['microseconds']:10.1f} {row['output_error']:8.1e} {row['state_error']:8.1e}"
            f"{' *' if row['chosen'] else ''}{'  WRONG' if wrong else ''}",
            flush=True,
        )
    return found


def print_methods(device: torch.device) -> list[dict]:
    found = []
    print(f"{'phase':<8} {'rows':<24} {'method':<7} {'us':>10} {'output':>8} {'state':>8}")
    for name, counts in (PROMPTS | DECODES).items():
        if device.type != "cuda" and name not in HOST_CASES:
            continue
        for row in measure(name, counts, device):
            found.append(row)
            wrong = not max(row["output_error"], row["state_error"]) < LIMIT
            print(
                f"{row['phase']:<8} {row['rows']:<24} {row['method']:<7} {row['microseconds']:10.1f} "
                f"{row['output_error']:8.1e} {row['state_error']:8.1e}{'  WRONG' if wrong else ''}",
                flush=True,
            )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sweep", action="store_true", help="compare launches of Triton's kernels for prompts")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.sweep and device.type != "cuda":
        parser.error("--sweep needs a CUDA device")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    found = print_sweep(device) if options.sweep else print_methods(device)
    if options.json:
        options.json.write_text(json.dumps({"device": options.device, "rows": found}, indent=1))
    return int(any(not max(row["output_error"], row["state_error"]) < LIMIT for row in found))


if __name__ == "__main__":
    raise SystemExit(main())
