"""A real model through the whole engine: SmolLM2-135M, ten prompts of different lengths in one batch, against transformers."""

from __future__ import annotations

import pytest
import torch

from flexgen import LLM, SamplingParams
from flexgen.demo import smollm_directory

TEXT = (
    "The history of the sea is long, and those who sail it learn early that the weather keeps its own calendar. "
    "In the spring the wind comes from the south, and the harbours fill with boats that waited all winter."
)


@pytest.mark.slow
def test_ten_prompts_equal_transformers():
    from transformers import AutoModelForCausalLM

    folder = smollm_directory()
    llm = LLM(model=str(folder), dtype="float32", device="cpu", max_model_len=256, max_num_seqs=10)
    ids = llm.get_tokenizer().encode(TEXT)
    prompts = [ids[:length] for length in (1, 2, 3, 5, 8, 13, 16, 17, 32, len(ids))]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=32, ignore_eos=True), use_tqdm=False)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for tokens, output in zip(prompts, outputs, strict=True):
        got = list(output.outputs[0].token_ids)
        assert len(got) == 32
        with torch.no_grad():
            wanted = reference(torch.tensor([tokens + got])).logits[0, len(tokens) - 1 : -1]
        logprobs = torch.log_softmax(wanted, dim=-1)
        assert logprobs.argmax(-1).tolist() == got  # teacher-forced: each token is transformers' greedy choice
