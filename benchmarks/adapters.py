"""What adapters cost, on Qwen3-30B-A3B's shapes with random weights: merged and attached decode against the base, a refresh, memory.

    python -m benchmarks.adapters [--device cuda] [--layers N] [--batches 8 16 32 64] [--rank 16] [--json out.json]

Four engines, one after the other: the base; the same with an adapter of attention and all experts merged; attached adapters of
attention; attached ones of attention and all experts. Attached batches are divided among `--loras` adapters. On a host, and with
`--tiny`, the model is the spec's tiny one.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexgen import LLM, LoRARequest, SamplingParams
from flexgen.bench.shapes import SHAPES
from flexgen.runtime.loading.model import Model

SHORT, LONG, PROMPT = 8, 136, 128
"""Tokens of the two runs whose difference is decode alone, and of each prompt."""

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def adapter(config: Mapping[str, Any], rank: int, experts: bool, seed: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An adapter's tensors, small enough that routing stays what it is, and its LoraConfig's fields."""
    generator = torch.Generator().manual_seed(seed)
    width, heads = config["hidden_size"], config["head_dim"]
    query, held = config["num_attention_heads"] * heads, config["num_key_value_heads"] * heads
    count, inner = config["num_experts"], config["moe_intermediate_size"]
    shapes = {"self_attn.q_proj": (width, query), "self_attn.k_proj": (width, held), "self_attn.v_proj": (width, held),
              "self_attn.o_proj": (query, width)}  # fmt: skip
    stacked = {"mlp.experts.base_layer": (width, 2 * inner), "mlp.experts": (inner, width)} if experts else {}
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module, (into, out) in (shapes | stacked).items():
            ranks = rank * count if module in stacked else rank
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = (torch.randn(ranks, into, generator=generator) * 0.01).to(dtype)
            tensors[f"{name}.lora_B.weight"] = (torch.randn(out, ranks, generator=generator) * 0.01).to(dtype)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ATTENTION}
    return tensors, fields | ({"target_parameters": EXPERTS} if experts else {})


def decode_seconds(llm: LLM, batch: int, vocab: int, loras: Sequence[LoRARequest | None]) -> float:
    """Seconds of a decode step: the difference of a long and a short run of the same prompts."""
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(3, vocab, (batch, PROMPT), generator=generator).tolist()
    brought = [loras[row % len(loras)] for row in range(batch)]
    taken = []
    for tokens in (SHORT, SHORT, LONG):
        llm.reset_prefix_cache()
        begin = time.perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), use_tqdm=False, lora_request=brought)
        taken.append(time.perf_counter() - begin)
    return (taken[2] - taken[1]) / (LONG - SHORT)


class Bench:
    """One model's directory and the rows measured on it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.rows = options, []
        self.config = dict(SHAPES["qwen3-30b-a3b"]) if not options.tiny else tiny_config()
        self.config["num_hidden_layers"] = options.layers or self.config["num_hidden_layers"]
        self.folder = Path(tempfile.mkdtemp(prefix="flexgen-adapters-"))
        (self.folder / "config.json").write_text(json.dumps(self.config))
        self.dtype = torch.bfloat16 if options.device == "cuda" else torch.float32

    def engine(self, **arguments: Any) -> LLM:
        _release(self.options.device)
        model = Model.load(self.folder, load_format="dummy", device=self.options.device, dtype=self.dtype)
        most = max(self.options.batches)
        blocks = most * -(-(PROMPT + LONG) // 16) + 1
        return LLM(model, skip_tokenizer_init=True, max_model_len=PROMPT + LONG + 16, max_num_seqs=most, num_gpu_blocks_override=blocks,
                   cudagraph_capture_sizes=sorted(set(self.options.batches)), **arguments)  # fmt: skip

    def measure(self, name: str, llm: LLM, loras: Sequence[LoRARequest | None], **more: Any) -> None:
        for batch in self.options.batches:
            taken = decode_seconds(llm, batch, self.config["vocab_size"], loras)
            self.rows.append({"what": name, "batch": batch, "milliseconds": taken * 1e3, "peak_GiB": _peak(self.options.device)} | more)
            print(f"{name}, batch {batch}: {taken * 1e3:.3f} ms a step", flush=True)
        print("\n".join(line for line in llm.report().splitlines() if "weights" in line or "adapters" in line or "without a graph" in line))

    def merged(self) -> None:
        """The base, then the same engine with an adapter merged and refreshed."""
        llm = self.engine()
        self.measure("base", llm, [None])
        tensors, fields = adapter(self.config, self.options.rank, True, 1, self.dtype)
        tensors = {name: tensor.to(self.options.device) for name, tensor in tensors.items()}
        llm.load_adapter(tensors, "bench", fields)
        refreshes = []
        for _ in range(5):
            _wait(self.options.device)
            begin = time.perf_counter()
            llm.refresh_adapter()
            _wait(self.options.device)
            refreshes.append((time.perf_counter() - begin) * 1e3)
        self.measure("merged", llm, [None], refresh_ms=min(refreshes))

    def attached(self, name: str, experts: bool) -> None:
        """An engine with room for adapters: without one, and with a batch divided among some."""
        targets = None if experts else ATTENTION
        llm = self.engine(enable_lora=True, max_loras=self.options.loras, max_lora_rank=self.options.rank, lora_target_modules=targets)
        loras = []
        for number in range(1, self.options.loras + 1):
            tensors, fields = adapter(self.config, self.options.rank, experts, number, self.dtype)
            loras.append(LoRARequest(f"bench {number}", number, lora_tensors=tensors, lora_config=fields))
        self.measure(f"{name}, none brought", llm, [None])
        self.measure(name, llm, loras)

    def table(self) -> str:
        base = {row["batch"]: row["milliseconds"] for row in self.rows if row["what"] == "base"}
        lines = [f"{'what':<40} {'batch':>5} {'ms a step':>10} {'of base':>8} {'peak GiB':>9} {'refresh ms':>10}"]
        for row in self.rows:
            share, refresh = base[row["batch"]] / row["milliseconds"], row.get("refresh_ms")
            lines.append(f"{row['what']:<40} {row['batch']:5} {row['milliseconds']:10.3f} {share:8.1%} {row['peak_GiB']:9.2f} "
                         f"{'' if refresh is None else format(refresh, '10.1f'):>10}")  # fmt: skip
        return "\n".join(lines)


def tiny_config() -> dict[str, Any]:
    """Sizes for a host."""
    return dict(SHAPES["qwen3-30b-a3b"]) | {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
    }  # fmt: skip


def _release(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _peak(device: str) -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes; always so on a host")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--loras", type=int, default=2, help="adapters of a batch")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    options.tiny |= options.device == "cpu"
    bench = Bench(options)
    bench.merged()
    bench.attached("attached, attention", experts=False)
    bench.attached("attached, attention and experts", experts=True)
    print(bench.table())
    if options.json:
        options.json.write_text(json.dumps({"device": options.device, "rank": options.rank, "rows": bench.rows}, indent=1))


if __name__ == "__main__":
    main()
