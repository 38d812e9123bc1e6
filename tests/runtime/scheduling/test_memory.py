"""What the memory report says of shared layers and windows, on a real run."""

from __future__ import annotations

import re

import torch
from tiny import prompt, saved

from flexgen import LLM, SamplingParams


def groups(report: str) -> dict[str, tuple[int, int, int]]:
    """Retention to (layers, pages, free pages)."""
    found = re.findall(r"pages, (\w+) .*?: (\d+) layers .*? (\d+) pages .*?\((\d+) free\)", report)
    return {kind: (int(layers), int(pages), int(free)) for kind, layers, pages, free in found}


def test_shared_layers_cost_nothing_and_windows_return_pages():
    torch.set_num_threads(1)
    reference, folder = saved("gemma4_e")
    llm = LLM(model=str(folder), device="cpu", dtype="float32", skip_tokenizer_init=True, max_model_len=128, max_num_seqs=2)
    assert len(llm.model.layers) == 6
    idle = groups(llm.report())
    assert {kind: layers for kind, (layers, _, _) in idle.items()} == {"all": 1, "last": 2}  # three layers share
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    used = []
    for output in llm.stream([prompt(100)], params):
        now = groups(llm.report())
        used.append({kind: pages - free for kind, (_, pages, free) in now.items()})
        last = output
    assert max(step["all"] for step in used) >= 7  # 112 tokens in pages of 16
    assert min(step["last"] for step in used[2:-1]) <= 2  # a window of 8 tokens
    with torch.no_grad():
        logits = reference(torch.tensor([prompt(100) + list(last.outputs[0].token_ids)])).logits[0, 99:-1]
    assert logits.argmax(-1).tolist() == list(last.outputs[0].token_ids)
