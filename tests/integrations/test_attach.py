"""A live model with an engine of its own: what it generates follows its weights."""

from __future__ import annotations

import pytest
import torch
from runtime.loading.adapters import wrapped

import flexgen
from flexgen import SamplingParams
from tests.tiny import expected, prompt, reference, tiny_config

TOKENS = prompt(24)
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SIZES = {"max_model_len": 64, "max_num_seqs": 4}


def generated(model, **arguments):
    (output,) = model.fast_generate([{"prompt_token_ids": TOKENS}], PARAMS, use_tqdm=False, **arguments)
    return output.outputs[0].token_ids


def follows(model, tokens):
    return expected(model, TOKENS + tokens[:-1])[len(TOKENS) - 1 :].argmax(-1).tolist() == tokens


@pytest.mark.parametrize("lora", [False, True])
def test_answers_follow_the_optimizer(lora):
    model = flexgen.attach(wrapped("llama") if lora else reference(tiny_config("llama")), **SIZES)
    first = generated(model)
    assert follows(model, first)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1)
    model(torch.tensor([TOKENS]), labels=torch.tensor([TOKENS])).loss.backward()
    optimizer.step()
    second = generated(model)
    assert follows(model, second) and second != first
    with pytest.raises(ValueError, match="has an engine already"):
        flexgen.attach(model)
    assert "fast_generate" not in vars(flexgen.detach(model))


def test_requests_bring_the_live_adapter_or_none(tmp_path):
    model = flexgen.attach(wrapped("llama"), enable_lora=True, max_lora_rank=8, **SIZES)
    own = generated(model, lora_request=model.load_lora("adapter", load_tensors=True))
    assert follows(model, own)
    model.save_lora(tmp_path / "saved")
    assert generated(model, lora_request=model.load_lora(str(tmp_path / "saved"))) == own
    with model.disable_adapter():
        assert follows(model, generated(model))
    assert model.vllm_engine.get_tokenizer is not None and model.vllm_engine.llm_engine.vllm_config.lora_config.max_lora_rank == 8
