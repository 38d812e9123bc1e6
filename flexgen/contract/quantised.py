"""Checkpoints whose config.json says that their weights are packed: by which method, and the way to plain weights for each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from flexgen.contract.json_files import shown

QUANTISED = ("quantization_config", "quantization", "compression_config")
"""Fields of config.json that say so."""

_WITH = "from_pretrained(DIR, quantization_config="
_DEQUANTISE = "from_pretrained(DIR, dtype='bfloat16').dequantize().save_pretrained(OUT)"
_ORIGINAL = (
    "transformers cannot turn it back into plain weights; take the 16-bit checkpoint that it was made from (its card's base_model)"
)

WAYS_OUT: Mapping[str, str] = MappingProxyType(
    {
        "mxfp4": _WITH + "Mxfp4Config(dequantize=True)).save_pretrained(OUT)",
        "fp8": _WITH + "FineGrainedFP8Config(dequantize=True)).save_pretrained(OUT)",
        "bitsandbytes": _DEQUANTISE,
        "bitsandbytes_4bit": _DEQUANTISE,
        "bitsandbytes_8bit": _DEQUANTISE,
        "compressed-tensors": _WITH + "CompressedTensorsConfig(dequantize=True)).save_pretrained(OUT)",
        "awq": _ORIGINAL,
        "gptq": _ORIGINAL,
        "fbgemm_fp8": _ORIGINAL,
        "modelopt": _ORIGINAL,
        "hqq": _ORIGINAL,
        "aqlm": _ORIGINAL,
        "exl2": _ORIGINAL,
        "exl3": _ORIGINAL,
        "quanto": _ORIGINAL,
        "torchao": _ORIGINAL,
        "mlx": "mlx_lm.convert --dequantize writes plain weights",
    }
)
"""By quant_method, what gives a checkpoint in 16 or 32 bits. `from_pretrained` is AutoModelForCausalLM's."""


def quantised(config: Mapping[str, Any]) -> str:
    """The message for a checkpoint that is quantised in a way that its spec does not describe."""
    given = next(config[field] for field in QUANTISED if config.get(field) is not None)
    method = given.get("quant_method") if isinstance(given, dict) else given
    if method is None and isinstance(given, dict) and "group_size" in given and "bits" in given:
        method = "mlx"
    known = WAYS_OUT.get(method) if isinstance(method, str) else None
    way = known or "write it in 16 or 32 bits first, or take the checkpoint that it was made from"
    named = shown(method) if method is not None else "a method that config.json does not name"
    return f"this checkpoint is quantised by {named}, in a way that this spec does not describe: {way}"
