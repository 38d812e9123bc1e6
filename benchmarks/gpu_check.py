"""Every spec's tiny model on a GPU against transformers on the host: largest error of logits in fp32.

    python benchmarks/gpu_check.py [--device cuda]

Whole prefill, then chunks and decode. The exit code is 1 where an error is above the limit.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from flexgen.runtime.loading.model import Model
from flexgen.verify.harness import Harness

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from tiny import SPECS, expected, prompt, saved

LIMIT = 1e-3
CHUNKS = (1, 16, 3, 19, 1)


def errors(spec: str, device: str) -> list[float]:
    """Of a whole prefill, and of chunks that end in decode."""
    reference, folder = saved(spec)
    tokens = prompt(sum(CHUNKS))
    wanted = expected(reference, tokens)
    model = Model.load(folder, dtype="float32", device=device)
    whole, bench = Harness(model).feed({0: tokens})[0], Harness(model)
    parts = [bench.feed({1: chunk.tolist()})[1] for chunk in torch.tensor(tokens).split(CHUNKS)]
    return [(logits.cpu() - wanted).abs().max().item() for logits in (whole, torch.cat(parts))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    torch.backends.cuda.matmul.allow_tf32 = False
    good = True
    for spec in SPECS:
        whole, parts = errors(spec, device)
        good &= max(whole, parts) < LIMIT
        print(f"{spec:14} whole {whole:.1e}   chunks and decode {parts:.1e}", flush=True)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
