"""Merged adapters compute what PEFT computes: dense modules and stacked experts, both orientations, two at once."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from tiny import expected, prompt, reference, tiny_config
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from flexgen.runtime.loading.lora import AdapterError, ExpertLowRank, LowRank, merge_experts, merge_rows, targets
from flexgen.runtime.loading.model import Model
from flexgen.runtime.ops.experts import experts
from flexgen.verify.harness import Harness

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
        rows = {row.role: row for row in ours.table(ours.dims.kinds[index])}
        held = targets(rows.values(), merge.MERGES)
        for role in {role for module in deltas for role in held[module]}:
            weight = getattr(layer, role)
            changed += merge.MERGES[role](weight, weight.clone(), rows[role], deltas)
    assert changed == len(ours.layers) * (len(DENSE) + len(stacked))
    tokens = prompt(24)
    got = Harness(ours).feed({0: tokens})[0]
    assert (got - expected(peft, tokens)).abs().max() < 1e-4


def test_several_updates_add_up_from_the_pristine_base():
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(7, 5, generator=generator)
    make = lambda rows: LowRank(torch.randn(2, 5, generator=generator), torch.randn(rows, 2, generator=generator), 0.5)
    first, second = make(4), make(4)
    out = torch.empty_like(base)
    for _ in range(2):
        assert merge_rows(out, base, {"q": 4, "k": 3}, {"q": [first, second]}) == 1
    assert torch.allclose(out[:4], base[:4] + 0.5 * (first.b @ first.a + second.b @ second.a), atol=1e-6)
    assert torch.equal(out[4:], base[4:])
    with pytest.raises(AdapterError, match=r"update of k has shape \(4, 5\)"):
        merge_rows(out, base, {"q": 4, "k": 3}, {"k": [first]})


class Block(torch.nn.Module):
    """An experts module where PEFT finds it, of `count` experts with random weights."""

    def __init__(self, storage: str, count: int, width: int, inner: int) -> None:
        super().__init__()
        config = SimpleNamespace(
            num_experts=count, num_local_experts=count, hidden_size=width, hidden_act="silu", swiglu_alpha=1.702,
            swiglu_limit=7.0, _experts_implementation="eager",
        )  # fmt: skip
        config.intermediate_size = config.moe_intermediate_size = inner
        self.experts = (GptOssExperts if storage == "transposed" else Qwen3MoeExperts)(config)
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.3)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.experts(x, chosen, weights)


@pytest.mark.parametrize("names", [("one",), ("one", "two")])
@pytest.mark.parametrize("width", [24, 16], ids=["wide", "2I = H"])
@pytest.mark.parametrize("storage", ["standard", "transposed"])
@torch.no_grad()
def test_merged_experts_compute_what_peft_computes(storage, width, names):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    inner, count, rank = 8 if width == 16 else 10, 5, 3
    block = Block(storage, count, width, inner)
    base = {name: parameter.detach().clone() for name, parameter in block.experts.named_parameters()}
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    config = LoraConfig(r=rank, lora_alpha=5, target_modules=[], target_parameters=parameters, init_lora_weights=False)
    peft = get_peft_model(block, config, adapter_name=names[0])
    for name in names[1:]:
        peft.add_adapter(name, config)
    peft.base_model.set_adapter(list(names))
    deltas: dict[str, list] = {}
    for module in peft.modules():
        if hasattr(module, "parameter_name"):
            for name in names:
                a, b = (getattr(module, f"lora_{part}")[name].weight for part in "AB")
                torch.nn.init.normal_(a, std=0.3)
                torch.nn.init.normal_(b, std=0.3)
                deltas.setdefault(module.parameter_name, []).append(ExpertLowRank(a, b, 5 / rank, count))
    x, (weights, chosen) = torch.randn(20, width), torch.rand(20, count).softmax(-1).topk(2)
    wanted = peft(x, chosen, weights)
    merged = {name: torch.empty_like(weight) for name, weight in base.items() if "bias" not in name}
    for name, out in merged.items():
        assert merge_experts(out, base[name], name, (), deltas, transposed=storage == "transposed") == 1
        total = base[name].clone()
        for update in deltas[name]:  # the textbook's sum, an expert at a time
            for expert in range(count):
                a = update.a.view(count, rank, -1)[expert]
                delta = update.scale * update.b.view(-1, rank, count)[..., expert] @ a
                total[expert] += delta.T if storage == "transposed" else delta
        torch.testing.assert_close(out, total, atol=1e-6, rtol=1e-6)
    gate = {"layout": "out_in"}
    if storage == "transposed":
        gate = {"layout": "in_out", "interleaved": True, "alpha": 1.702, "limit": 7.0, "up_offset": 1.0}
        gate |= {"gate_up_bias": base["gate_up_proj_bias"], "down_bias": base["down_proj_bias"]}
    got = experts(x, weights, chosen, merged["gate_up_proj"], merged["down_proj"], **gate)
    assert (got - wanted).abs().max() < 1e-5
    assert (got - experts(x, weights, chosen, base["gate_up_proj"], base["down_proj"], **gate)).abs().max() > 0.1


def per_expert_adapter(folder, layers, experts, width, inner, scale=0.1):
    """An adapter as PEFT wrote it while each expert had modules of its own; -> its tensors by module."""
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 6}
    config["target_modules"] = ["gate_proj", "up_proj", "down_proj"]
    sizes = {"gate_proj": (width, inner), "up_proj": (width, inner), "down_proj": (inner, width)}
    modules = {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}": (scale * torch.randn(3, i), scale * torch.randn(o, 3))
        for layer in range(layers)
        for expert in range(experts)
        for name, (i, o) in sizes.items()
    }
    tensors = {f"base_model.model.{m}.lora_{p}.weight": w for m, pair in modules.items() for p, w in zip("AB", pair)}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return modules


def test_adapters_with_a_module_an_expert_compute_what_peft_makes_of_them(tmp_path):
    from peft import PeftModel

    torch.manual_seed(3)
    config = tiny_config("qwen3_moe", num_experts=5, mlp_only_layers=[])
    oracle = reference(config)
    oracle.save_pretrained(tmp_path)
    ours = Model.load(tmp_path, dtype="float32", device="cpu")
    width, inner = config["hidden_size"], config["moe_intermediate_size"]
    modules = per_expert_adapter(tmp_path, len(ours.layers), 5, width, inner)
    peft = PeftModel.from_pretrained(oracle, tmp_path)
    merge, tokens = ours.package.merge, prompt(24)
    rows = {row.role: row for row in ours.table(ours.dims.kinds[0])}
    held = targets(rows.values(), merge.MERGES)
    assert {held[f"mlp.experts.*.{name}"] for name in ("gate_proj", "up_proj")} == {("moe_gate_up",)}
    plain = Harness(ours).feed({0: tokens})[0]
    for index, layer in enumerate(ours.layers):
        prefix = f"model.layers.{index}."
        deltas = {m.removeprefix(prefix): [LowRank(a, b, 2.0)] for m, (a, b) in modules.items() if m.startswith(prefix)}
        for role, modules_changed in (("moe_gate_up", 10), ("moe_down", 5)):
            weight = getattr(layer, role)
            assert merge.MERGES[role](weight, weight.clone(), rows[role], deltas) == modules_changed
    got = Harness(ours).feed({0: tokens})[0]
    assert (got - expected(peft, tokens)).abs().max() < 1e-4
    assert (got - plain).abs().max() > 0.1


def test_a_module_of_one_expert_that_does_not_fit_is_named():
    base, update = torch.zeros(4, 6, 5), LowRank(torch.ones(2, 5), torch.ones(3, 2), 1.0)
    merge = lambda deltas: merge_experts(base.clone(), base, "e.gate_up", ("e.*.gate", "e.*.up"), deltas, transposed=False)
    assert merge({"e.2.up": [update, update], "e.3.up": [update]}) == 2
    with pytest.raises(AdapterError, match=r"update of e\.3\.gate has shape \(2, 5\), and the weight has \(3, 5\)"):
        merge({"e.3.gate": [LowRank(torch.ones(2, 5), torch.ones(2, 2), 1.0)]})


def test_matrices_that_do_not_belong_together_are_refused_by_their_shapes():
    with pytest.raises(AdapterError, match=r"A has shape \(2, 5\) and its B \(4, 3\)"):
        LowRank(torch.ones(2, 5), torch.ones(4, 3), 1.0)
    with pytest.raises(AdapterError, match=r"A has shape \(7, 6\) and its B \(4, 7\): .* a multiple of the 5 experts"):
        ExpertLowRank(torch.ones(7, 6), torch.ones(4, 7), 1.0, 5)
    with pytest.raises(AdapterError, match=r"both are matrices"):
        LowRank(torch.ones(2, 5, 1), torch.ones(4, 2), 1.0)
