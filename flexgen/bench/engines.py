"""The engines that are measured, each behind the same two methods: `generate` and `close`."""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from flexgen.bench.bound import H200_BYTES_PER_SECOND, step_bytes
from flexgen.bench.shapes import LOADING, shape
from flexgen.bench.workloads import DECODE, Workload
from flexgen.runtime.llm import LLM
from flexgen.runtime.loading.model import Model

_PROBE_TOKENS = 8


class Flexgen:
    """This project's engine on random weights of the named shape."""

    name = "flexgen"
    grows = False

    def __init__(self, model: str, layers: int | None = None, **options: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(shape(model, layers)))
            self.model = Model.load(folder, load_format="dummy", **LOADING.get(model, {}))
        storages = [getattr(layer, weight.role) for layer, weight, _ in self.model.storages()]
        self.weight_bytes = sum(tensor.numel() * tensor.element_size() for tensor in storages)
        self._routes = self._probe_routes(options.get("max_num_seqs", 256))
        options = {"max_model_len": 1024, "max_num_seqs": 256, "skip_tokenizer_init": True, **options}
        self.llm = LLM(self.model, **options)

    @property
    def startup_seconds(self) -> dict[str, float]:
        return self.llm.llm_engine.startup

    @property
    def kv_bytes(self) -> int:
        return self.llm.llm_engine.cache.total_bytes

    @property
    def uncaptured(self) -> list[str]:
        graphs = self.llm.llm_engine.runner.graphs
        return ["everything"] if graphs is None else graphs.failures

    def generate(self, prompts: Sequence[list[int]], workload: Workload) -> int:
        """Answer all at once; the number of generated tokens. Raises ValueError for more prompts than slots."""
        slots = self.llm.llm_engine.options.max_num_seqs
        if len(prompts) > slots:
            raise ValueError(f"batch {len(prompts)} is more than this engine runs at once (max_num_seqs={slots})")
        outputs = self.llm.generate(list(prompts), workload.params(), use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def experts_touched(self, batch: int) -> float | None:
        """Distinct experts of a layer that one step of `batch` tokens goes to, on average over steps and layers."""
        if self._routes is None:
            return None
        chosen = self._routes[:batch].permute(1, 2, 0, 3).flatten(0, 1)
        return mean(len(of_layer.unique()) for of_layer in chosen)

    def bound(self, batch: int, workload: Workload) -> float:
        """Tokens a second at the bandwidth of an H200, of decode steps at their mean length."""
        context = workload.prompt + workload.new / 2
        return batch * H200_BYTES_PER_SECOND / step_bytes(self.model, batch, context, self.experts_touched(batch)).total

    def close(self) -> None:
        """Release the device memory."""
        del self.llm, self.model
        _release()

    def _probe_routes(self, most: int) -> Tensor | None:
        """Experts of a few uncaptured decode steps, (requests, steps, routers, K); None for a model without experts."""
        if not any(self.model.routers):
            return None
        params = DECODE.params()
        params.max_tokens = _PROBE_TOKENS
        probe = LLM(
            self.model,
            max_model_len=DECODE.prompt + _PROBE_TOKENS,
            max_num_seqs=most,
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_return_routed_experts=True,
        )
        outputs = probe.generate(DECODE.prompts(most, run=0), params, use_tqdm=False)
        recorded = [output.outputs[0].routed_experts for output in outputs]
        routes = [torch.from_numpy(experts[DECODE.prompt :]) for experts in recorded if experts is not None]
        del probe
        _release()
        return torch.stack(routes)


class Transformers:
    """`generate` of transformers, eager but for its attention (sdpa), on random weights of the same shape."""

    name = "transformers"
    grows = True
    kv_bytes = None

    def __init__(self, model: str, layers: int | None = None) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        started = time.perf_counter()
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        fields = shape(model, layers)
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        with self._device:
            self.model = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation="sdpa"
            ).eval()
        self.startup_seconds = {"load": time.perf_counter() - started}
        self.weight_bytes = sum(p.numel() * p.element_size() for p in self.model.parameters())
        self.uncaptured: list[str] = ["everything"]

    def generate(self, prompts: Sequence[list[int]], workload: Workload) -> int:
        ids = torch.tensor(list(prompts), device=self._device)
        sampling = {"do_sample": workload.temperature > 0, "temperature": workload.temperature or None, "top_k": 0}
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=workload.new,
            min_new_tokens=workload.new,
            pad_token_id=0,
            **sampling,
        )
        return out[:, ids.shape[1] :].numel()

    def experts_touched(self, batch: int) -> None:
        return None

    def bound(self, batch: int, workload: Workload) -> None:
        return None

    def close(self) -> None:
        self.model = None
        _release()


ENGINES = {each.name: each for each in (Flexgen, Transformers)}


def engine_named(name: str) -> type[Flexgen] | type[Transformers]:
    """Raises ValueError for a name that no engine has."""
    if name not in ENGINES:
        raise ValueError(f"no engine {name!r} to measure; there are {', '.join(ENGINES)}")
    return ENGINES[name]


def _release() -> None:
    """Free what nobody holds any more, so that the next engine's memory and its peak are its own."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
