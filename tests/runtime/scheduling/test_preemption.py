"""Every family through the engine with too few pages: preempted requests keep their tokens, which are transformers'."""

from __future__ import annotations

import pytest
import torch
from tiny import SOME, prompt, saved

from flexgen import LLM, SamplingParams


@pytest.mark.parametrize("spec", SOME)
def test_tight_pool_gives_the_tokens_of_transformers(spec):
    torch.set_num_threads(1)
    reference, folder = saved(spec)
    llm = LLM(
        model=str(folder), device="cpu", dtype="float32", skip_tokenizer_init=True, max_model_len=64, max_num_seqs=3,
        block_size=8, num_gpu_blocks_override=8, max_num_batched_tokens=24,
    )  # fmt: skip
    prompts = [prompt(length, seed=length) for length in (30, 17, 25, 1)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), use_tqdm=False)
    assert llm.metrics()["preemptions"] > 0
    for tokens, output in zip(prompts, outputs, strict=True):
        got = list(output.outputs[0].token_ids)
        with torch.no_grad():
            logits = reference(torch.tensor([tokens + got])).logits[0, len(tokens) - 1 : -1]
        assert logits.argmax(-1).tolist() == got
    assert llm.metrics()["free_blocks"] == llm.metrics()["total_blocks"]
    assert llm.metrics()["free_slots"] == llm.metrics()["total_slots"] == 3
