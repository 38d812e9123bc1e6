"""Tiny models of every spec, made by transformers with every tensor random, and the pages to run ours with."""

from __future__ import annotations

import copy
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import torch

from flexgen.assets import root
from flexgen.runtime.abi import Pages, PageStep, SharedPages, Slots, Step
from flexgen.runtime.model import Model

SPECS = sorted(path.stem for path in root("specs").glob("*.yaml"))


def tiny_config(spec: str, **changes: Any) -> dict[str, Any]:
    from flexgen.spec.load import load_spec

    config = copy.deepcopy(load_spec(root("specs") / f"{spec}.yaml").model.tiny)
    config.update({"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}, **changes)
    return {key: value for key, value in config.items() if value is not ...}


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Every parameter and persistent buffer random, of a size that keeps activations sane and shows a missing term."""
    generator = torch.Generator().manual_seed(seed)
    state = model.state_dict(keep_vars=True)
    seen = set()
    for name, tensor in state.items():
        if tensor.data_ptr() in seen or not tensor.is_floating_point():
            continue
        seen.add(tensor.data_ptr())
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.dim() < 2 or name.endswith(("_proj_bias", "A_log", "dt_bias")):
            value = tensor + 0.25 * noise
        elif "embed" in name or "lm_head" in name:
            value = 0.5 * noise
        elif "router" in name or name.endswith("mlp.gate.weight"):
            value = 2.0 * noise / math.sqrt(tensor.shape[-1])
        else:
            fan = tensor.shape[-2] if model.config.model_type == "gpt_oss" and tensor.dim() == 3 else tensor.shape[-1]
            value = noise / math.sqrt(fan)
        tensor.copy_(value)


def reference(config: dict[str, Any], seed: int = 0) -> Any:
    """A transformers model in fp32, eager attention and experts."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {key: value for key, value in config.items() if key != "model_type"}
    made = AutoConfig.for_model(config["model_type"], **copy.deepcopy(fields))
    made._experts_implementation = "eager"
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(made, attn_implementation="eager").float().eval()
    randomise(model, seed)
    return model


@cache
def saved(spec: str) -> tuple[Any, Path]:
    """The spec's tiny model and a directory that transformers saved it to."""
    import tempfile

    model = reference(tiny_config(spec))
    folder = Path(tempfile.mkdtemp(prefix=f"flexgen-{spec}-"))
    model.save_pretrained(folder)
    return model, folder


class Bench:
    """Pools big enough for everything, and steps by hand: the model without an engine."""

    def __init__(self, model: Model, rows: int = 4, length: int = 128, page: int = 16) -> None:
        self.model, self.page = model, page
        blocks = -(-length // page)
        model.make_rope_tables(length)
        device = model.device
        self.tables = torch.arange(1, rows * blocks + 1, dtype=torch.int32, device=device).view(rows, blocks)
        owners: dict[str, Any] = {}
        for layer, mixers in zip(model.layers, model.mixers, strict=True):
            for entry in mixers:
                state = model.state[entry]
                if isinstance(state, Pages):
                    shape = (rows * blocks + 1, page, state.kv_heads, state.head_dim)
                    layer.k_pages, layer.v_pages = (torch.full(shape, math.nan, dtype=model.dtype, device=device) for _ in range(2))
                    owners[entry] = layer
                elif isinstance(state, SharedPages):
                    layer.k_pages, layer.v_pages = owners[state.owner].k_pages, owners[state.owner].v_pages
                elif isinstance(state, Slots):
                    for name, (shape, dtype) in state.tensors.items():
                        setattr(layer, name, torch.zeros((rows + 1, *shape), dtype=dtype or model.dtype, device=device))
        self.lengths = [0] * rows

    def run(self, chunks: dict[int, list[int]]) -> dict[int, torch.Tensor]:
        """Feed tokens to rows -> the logits of each row's tokens."""
        ids, positions, rows, starts, lengths, slots, spans = [], [], [], [0], [], [], []
        for number, (row, tokens) in enumerate(chunks.items()):
            for offset, token in enumerate(tokens):
                position = self.lengths[row] + offset
                ids.append(token)
                positions.append(position)
                rows.append(number)
                slots.append(int(self.tables[row, position // self.page]) * self.page + position % self.page)
            self.lengths[row] += len(tokens)
            starts.append(len(ids))
            lengths.append(self.lengths[row])
            spans.append((starts[-2], starts[-1], self.lengths[row]))
        def tensor(values: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=self.model.device)

        pages = PageStep(tensor(slots), self.tables[list(chunks)])
        step = Step(
            positions_T=tensor(positions),
            rows_T=tensor(rows, torch.int32),
            starts_R=tensor(starts, torch.int32),
            lengths_R=tensor(lengths, torch.int32),
            pages=dict.fromkeys(self.model.state, pages),
            state_R=tensor([row + 1 for row in chunks]),
            max_query=max(len(tokens) for tokens in chunks.values()),
            spans=spans,
        )
        logits = self.model.logits(self.model.forward(tensor(ids), step))
        return {row: logits[start:stop] for row, (start, stop, _) in zip(chunks, spans, strict=True)}


def expected(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def prompt(length: int, seed: int = 7) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 211, (length,), generator=generator).tolist()


def dump(config: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
