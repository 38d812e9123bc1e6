"""The gated delta rule alone: the plain forms, Triton's and flash-linear-attention's, at the sizes of Qwen 3.6.

    python benchmarks/delta.py [--device cuda] [--json out.json]

The errors are |output - reference| and |state - reference| over |reference| (norms), against the plain chunked form in
float64; above the limit a method is marked and the exit code is 1. Methods that are not there are left out.

flash-linear-attention is the extra `fla`. For a machine without a network, elsewhere:

    pip download --no-deps -d wheels flash-linear-attention fla-core einops
    pip install --no-deps --no-index --find-links wheels flash-linear-attention einops fla-core   # over there
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from timing import seconds

from flexgen.runtime import recurrent

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
SETS = 3

Method = Callable[..., torch.Tensor]


def plain_prefill(q, k, v, g, beta, state, starts, slots) -> torch.Tensor:
    wide = (*recurrent._unit_heads(q, k, VALUE_HEADS), v.float(), g, beta.float())
    return recurrent.chunked_rule(*wide, state, starts, slots).to(v.dtype)


def plain_decode(q, k, v, g, beta, state, starts, slots) -> torch.Tensor:
    wide = (*recurrent._unit_heads(q, k, VALUE_HEADS), v.float(), g, beta.float())
    return recurrent.recurrent_rule(*wide, state, slots).to(v.dtype)


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
        from flexgen.runtime.kernels.delta_rule import delta_prefill, delta_step

        step = lambda *inputs: delta_step(*inputs[:6], inputs[7])  # noqa: E731
        found["triton"] = (step if decode else delta_prefill, True)
        if find_spec("fla") is not None:
            found["fla"] = (fla_decode if decode else recurrent.flash_linear_attention, False)
    return found


def inputs_of(counts: list[int], device: torch.device) -> tuple[torch.Tensor, ...]:
    tokens, dtype = sum(counts), torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k = torch.randn(2, tokens, KEY_HEADS, KEY, device=device).to(dtype)
    v = torch.randn(tokens, VALUE_HEADS, VALUE, device=device).to(dtype)
    g = -torch.rand(tokens, VALUE_HEADS, device=device) * 0.2
    beta = torch.rand(tokens, VALUE_HEADS, device=device).to(dtype)
    state = torch.randn(len(counts) + 1, VALUE_HEADS, KEY, VALUE, device=device) * 0.1
    starts = torch.tensor([0, *counts], device=device).cumsum(0).int()
    return q, k, v, g, beta, state, starts, torch.arange(1, len(counts) + 1, device=device)


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    device, found = torch.device(options.device), []
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
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
    if options.json:
        options.json.write_text(json.dumps({"device": options.device, "rows": found}, indent=1))
    return int(any(not max(row["output_error"], row["state_error"]) < LIMIT for row in found))


if __name__ == "__main__":
    raise SystemExit(main())
