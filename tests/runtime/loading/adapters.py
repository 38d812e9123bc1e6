"""Adapters of tiny models as PEFT makes them, with every factor random."""

from __future__ import annotations

import torch
from tiny import reference, tiny_config
from torch import nn

EXPERTS = {
    "qwen3_moe": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "gpt_oss": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "gemma4_moe": ["experts.gate_up_proj", "experts.down_proj"],
    "qwen3_5_moe": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}


def linear_modules(model) -> list[str]:
    """Last parts of the names of a model's linear modules but the head, which no router is."""
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if type(module) is nn.Linear}
    return sorted(names - {"lm_head", "proj", "gate", "router"})


def randomised(peft, seed=1, size=0.1):
    """Every factor of a PeftModel drawn anew, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    return peft.eval()


def wrapped(spec, seed=0, model=None, **changes):
    """A tiny model with an adapter on all that it has: linear modules, and experts as `target_parameters`."""
    from peft import LoraConfig, get_peft_model

    model = model if model is not None else reference(tiny_config(spec), seed)
    fields = {"r": 3, "lora_alpha": 6, "target_modules": linear_modules(model), "target_parameters": EXPERTS.get(spec)} | changes
    return randomised(get_peft_model(model, LoraConfig(**fields)), seed + 1)
