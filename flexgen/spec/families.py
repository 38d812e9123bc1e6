"""The table of families that flexgen serves, for the README: made from the specs, so that a new one is in it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from flexgen.spec.load import load_spec

BEGIN, END = "<!-- families: made by `flexgen schema` -->\n", "<!-- end of families -->\n"

SUCH_AS = {
    "apertus": "Apertus 8B, 70B",
    "bloom": "BLOOM, BLOOMZ",
    "cohere2": "Command R7B, Command A",
    "ernie4_5": "ERNIE 4.5 0.3B",
    "ernie4_5_moe": "ERNIE 4.5 21B-A3B, 300B-A47B",
    "falcon": "Falcon 7B",
    "falcon_new": "Falcon 40B, 180B, Falcon 2 11B",
    "gemma": "Gemma 2B, 7B",
    "gemma2": "Gemma 2 2B, 9B, 27B",
    "gemma3": "Gemma 3 270M to 27B",
    "gemma4_dense": "Gemma 4 31B",
    "gemma4_e": "Gemma 4 E2B, E4B",
    "gemma4_moe": "Gemma 4 26B-A4B",
    "glm4_moe": "GLM 4.5, 4.6, 4.7",
    "gpt2": "GPT-2, DistilGPT-2",
    "gpt_neox": "Pythia, GPT-NeoX 20B",
    "gpt_oss": "gpt-oss 20B, 120B",
    "granite": "Granite 3",
    "granitemoe": "Granite 3 MoE",
    "llama": "Llama 2 to 3.3, SmolLM2, Yi, TinyLlama",
    "llama4": "Llama 4 Scout, Maverick (their text part)",
    "ministral3": "Ministral 3 3B to 14B",
    "mistral": "Mistral 7B, Nemo, Small",
    "mixtral": "Mixtral 8x7B, 8x22B",
    "nemotron": "Nemotron 4, Minitron",
    "olmo2": "OLMo 2 1B to 32B",
    "olmoe": "OLMoE 1B-7B",
    "opt": "OPT 125M to 66B",
    "phi3": "Phi-3, Phi-3.5, Phi-4",
    "phimoe": "Phi-3.5-MoE",
    "qwen2": "Qwen2, Qwen2.5, QwQ",
    "qwen2_moe": "Qwen1.5-MoE, Qwen2-57B-A14B",
    "qwen3": "Qwen3 0.6B to 32B, Qwen3-Embedding's trunk",
    "qwen3_5": "Qwen3.5 dense",
    "qwen3_5_moe": "Qwen3.5 and Qwen3.6 MoE",
    "qwen3_moe": "Qwen3 30B-A3B, 235B-A22B",
    "smollm3": "SmolLM3 3B",
    "starcoder2": "StarCoder2 3B, 7B, 15B",
}
"""Published checkpoints whose config class a family's spec is held against; a family may be in the table without any."""


def table(specs: Iterable[Path]) -> str:
    """A row a spec: its name, the model types it serves, and checkpoints that have them."""
    rows = ["| spec | model_type | such as |", "|---|---|---|"]
    for path in specs:
        model = load_spec(path).model
        types = ", ".join(f"`{name}`" for name in model.checkpoint.model_types)
        rows.append(f"| [{model.name}](specs/{path.name}) | {types} | {SUCH_AS.get(model.name, '')} |")
    return "\n".join(rows) + "\n"


def with_table(readme: str, specs: Iterable[Path]) -> str:
    """A README with the table between its two marks."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table(specs)}{END}{after}"
