"""MXFP4 weights against transformers' own dequantisation, bit for bit."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import expected, prompt, reference, tiny_config
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from flexgen import LLM, SamplingParams
from flexgen.errors import ConfigError
from flexgen.runtime.loading.model import Model
from flexgen.runtime.loading.mxfp4 import dequantise
from flexgen.verify.harness import Harness
from flexgen.verify.reference import save


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equals_theirs_for_every_code_and_scale(dtype):
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (3, 20, 4, 16), dtype=torch.uint8)
    scales = torch.randint(0, 256, (3, 20, 4), dtype=torch.uint8)
    blocks[0].flatten()[:256] = torch.arange(256, dtype=torch.uint8)
    ours = dequantise(blocks, scales, dtype)
    assert ours.shape == (3, 128, 20) and ours.is_contiguous() and ours.dtype == dtype
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_a_known_value():
    blocks = torch.zeros(1, 1, 1, 16, dtype=torch.uint8)
    blocks[0, 0, 0, 0] = 0xF3
    values = dequantise(blocks, torch.tensor([[[128]]], dtype=torch.uint8), torch.float32)
    assert values[0, :3, 0].tolist() == [3.0, -12.0, 0.0]


def test_refuses_blocks_and_scales_that_do_not_belong_together():
    blocks = torch.zeros(2, 8, 4, 16, dtype=torch.uint8)
    with pytest.raises(ConfigError, match=r"\(2, 8, 4, 16\).*\(2, 8, 3\)"):
        dequantise(blocks, torch.zeros(2, 8, 3, dtype=torch.uint8), torch.float32)


def quantised(folder):
    """A gpt-oss checkpoint whose experts are random blocks and scales, as the released ones are written."""
    config = tiny_config("gpt_oss", intermediate_size=64)
    save(reference(config), folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, out = tensors.pop(name).shape
        shape = (experts, out, inner // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(122, 126, shape, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    written["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(written))


def test_a_quantised_checkpoint_is_the_model_that_transformers_makes_of_it(tmp_path):
    torch.manual_seed(1)
    quantised(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config._experts_implementation = "eager"
    oracle = AutoModelForCausalLM.from_pretrained(
        tmp_path, config=config, quantization_config=Mxfp4Config(dequantize=True), attn_implementation="eager"
    ).float()
    model = Model.load(tmp_path, dtype="float32", device="cpu")
    for ours, theirs in zip(model.layers, oracle.model.layers, strict=True):
        assert torch.equal(ours.moe_gate_up, theirs.mlp.experts.gate_up_proj)
        assert torch.equal(ours.moe_down, theirs.mlp.experts.down_proj)
    tokens = prompt(40)
    wanted = expected(oracle, tokens)
    assert (Harness(model).feed({0: tokens})[0] - wanted).abs().max() < 1e-4
    llm = LLM(model, skip_tokenizer_init=True, max_model_len=64, num_gpu_blocks_override=8)
    (answer,) = llm.generate([tokens[:20]], SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    got = answer.outputs[0].token_ids
    assert expected(oracle, tokens[:20] + got)[19:-1].argmax(-1).tolist() == got
