"""Every spec's tiny model on the GPU against transformers on the CPU: fp32, whole prefill, chunks and decode.

    PYTHONPATH=. python benchmarks/gpu_check.py FOLDER   # FOLDER/NAME holds a checkpoint and `expected.pt` for each spec
"""

import sys
import traceback
from pathlib import Path

import torch

sys.path.insert(0, "tests")
from tiny import Bench

from flexgen.runtime.model import Model


def main(folder: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    for path in sorted(folder.iterdir()):
        try:
            tokens, wanted = torch.load(path / "expected.pt")
            model = Model.load(path, dtype="float32", device="cuda", generated=Path("generated") / path.name)
            whole = Bench(model).run({0: tokens})[0].cpu()
            bench = Bench(model)
            parts = [bench.run({1: tokens[a:b]})[1] for a, b in ((0, 1), (1, 17), (17, 20), (20, 39), (39, 40))]
            error = [(x - wanted).abs().max().item() for x in (whole, torch.cat(parts).cpu())]
            print(f"{path.name:14} whole {error[0]:.1e} chunks and decode {error[1]:.1e}", flush=True)
        except Exception:
            print(path.name, "FAILED", traceback.format_exc(limit=-3), flush=True)


main(Path(sys.argv[1]))
