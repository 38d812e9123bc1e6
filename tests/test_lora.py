"""Merged adapters compute what PEFT computes: dense modules and stacked experts, both orientations, two at once."""

from __future__ import annotations

import pytest
import torch
from tiny import Bench, expected, prompt, reference, tiny_config

from flexgen.runtime.lora import AdapterError, ExpertLowRank, LowRank, merge_rows
from flexgen.runtime.model import Model

DENSE = ["q_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CASES = {
    "llama": {},
    "qwen3_moe": {"num_experts": 5, "mlp_only_layers": []},
    "qwen3_moe-square": {"num_experts": 5, "moe_intermediate_size": 32, "mlp_only_layers": []},
    "gpt_oss": {"num_local_experts": 5},
}


def adapters(model, layer: int, experts: int, scale: float) -> dict[str, list]:
    """A PEFT model's updates of one layer by module, as our merge takes them."""
    found: dict[str, list] = {}
    for name, module in model.named_modules():
        if f".layers.{layer}." not in name or not hasattr(module, "lora_A") or "default" not in module.lora_A:
            continue
        a, b = module.lora_A["default"].weight.detach(), module.lora_B["default"].weight.detach()
        path = name.split(f".layers.{layer}.")[1].replace(".base_layer", "")
        if hasattr(module, "parameter_name"):
            found.setdefault(f"{path}.{module.parameter_name}", []).append(ExpertLowRank(a, b, scale, experts))
        else:
            found.setdefault(path, []).append(LowRank(a, b, scale))
    return found


@pytest.mark.parametrize("case", CASES)
def test_merge_equals_peft(case, tmp_path):
    from peft import LoraConfig, get_peft_model

    torch.set_num_threads(1)
    spec = case.split("-")[0]
    oracle = reference(tiny_config(spec, **CASES[case]))
    oracle.save_pretrained(tmp_path)
    ours = Model.load(tmp_path, dtype="float32", device="cpu")
    stacked = EXPERTS if spec != "llama" else []
    config = LoraConfig(r=3, lora_alpha=6, target_modules=DENSE, target_parameters=stacked or None, init_lora_weights=False)
    peft = get_peft_model(oracle, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    merge, changed = ours.package.merge, 0
    for index, layer in enumerate(ours.layers):
        deltas = adapters(peft, index, 5, 2.0)
        assert set(deltas) == {f"self_attn.{m}" for m in DENSE} | set(stacked)
        for role in {merge.LORA[module] for module in deltas}:
            weight = getattr(layer, role)
            changed += merge.MERGES[role](weight, weight.clone(), deltas, ours.dims)
    assert changed == len(ours.layers) * (len(DENSE) + len(stacked))
    tokens = prompt(24)
    got = Bench(ours).run({0: tokens})[0]
    assert (got - expected(peft, tokens)).abs().max() < 1e-4


def test_several_updates_add_up_from_the_pristine_base():
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(7, 5, generator=generator)
    make = lambda rows: LowRank(torch.randn(2, 5, generator=generator), torch.randn(rows, 2, generator=generator), 0.5)
    first, second = make(4), make(4)
    out = torch.empty_like(base)
    for _ in range(2):
        assert merge_rows(out, base, {"q": 4, "k": 3}, {"q": [first, second]}) == 1
    assert torch.allclose(out[:4], base[:4] + first.delta() + second.delta(), atol=1e-6)
    assert torch.equal(out[4:], base[4:])
    with pytest.raises(AdapterError, match=r"update of k has shape \(4, 5\)"):
        merge_rows(out, base, {"q": 4, "k": 3}, {"k": [first]})
