"""The error of 16-bit arithmetic at real shapes, ours against transformers': see flexgen/verify/precision.py.

    python benchmarks/precision.py CONFIG.json [...] [--layers 4] [--device cuda] [--json out.json]

Each model has random weights and the first `--layers` layers of its config. The fp32 model, transformers' in bf16 and ours
are on the device together. The exit code is 1 where ours is more than 1.1 times as far off.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from flexgen.runtime.loading.model import Model
from flexgen.verify import reference
from flexgen.verify.precision import LIMIT, Rounding, rounding


def shortened(config: dict, layers: int) -> dict:
    """The text part of a config.json with its first `layers` layers."""
    text = dict(config.get("text_config") or config)
    text["num_hidden_layers"] = layers
    if text.get("layer_types"):
        text["layer_types"] = text["layer_types"][:layers]
    if text.get("per_layer_config"):
        text["per_layer_config"] = {i: each for i, each in text["per_layer_config"].items() if int(i) < layers}
    return text


def measure(config: dict, options: argparse.Namespace) -> Rounding:
    vocab = config["vocab_size"]
    with tempfile.TemporaryDirectory() as folder:
        reference.save(reference.tiny(config).bfloat16(), folder)
        exact, rounded = (reference.load(Path(folder), options.device, dtype) for dtype in (torch.float32, torch.bfloat16))
        model = Model.load(folder, dtype="bfloat16", device=options.device)
        draw = torch.Generator().manual_seed(0)
        shape = (options.rows, options.length)
        sequences = torch.randint(1, vocab, shape, generator=draw).tolist()
        return rounding(model, exact, rounded, sequences, options.prefill)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", type=Path, nargs="+")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=128, help="tokens of each row")
    parser.add_argument("--prefill", type=int, default=64, help="tokens of a row that run at once; the others decode")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    found = []
    for path in options.configs:
        config = shortened(json.loads(path.read_text()), options.layers)
        result = measure(config, options)
        found.append({"config": str(path), "layers": options.layers, "ratio": result.ratio, **asdict(result)})
        print(f"{path}: {result}{'' if result.ratio <= LIMIT else '  TOO FAR'}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"device": options.device, "rows": found}, indent=1))
    return int(any(row["ratio"] > LIMIT for row in found))


if __name__ == "__main__":
    raise SystemExit(main())
