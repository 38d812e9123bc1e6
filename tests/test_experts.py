"""What routers and windows can meet in a whole model: ties, experts that get every token or none, pages around a window."""

from __future__ import annotations

import pytest
import torch
from tiny import expected, prompt, reference, tiny_config

from flexgen import LLM, SamplingParams
from flexgen.runtime.loading.model import Model
from flexgen.verify.harness import Harness
from flexgen.verify.reference import recorded, save

TOP_K = {"qwen3_moe": "num_experts_per_tok", "gpt_oss": "num_experts_per_tok", "gemma4_moe": "top_k_experts",
         "qwen3_5_moe": "num_experts_per_tok"}  # fmt: skip
ROUTERS = ("mlp.gate.weight", "router.weight", "router.proj.weight", "router.bias")


def equal_in_pairs(weight):
    weight[1::2] = weight[0::2]


CASES = {
    "ties": (equal_in_pairs, 3, 40),
    "every token to one expert": (torch.Tensor.zero_, 1, 40),
    "one token": (equal_in_pairs, 2, 1),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("spec", TOP_K)
def test_routers_choose_as_transformers_do(spec, case, tmp_path):
    change, k, length = CASES[case]
    oracle = reference(tiny_config(spec, **{TOP_K[spec]: k}))
    routers = {name: module for name, module in oracle.named_modules() if type(module).__name__.endswith("Router")}
    with torch.no_grad():
        for name, tensor in oracle.named_parameters():
            if name.endswith(ROUTERS):
                change(tensor)
    save(oracle, tmp_path)
    tokens = prompt(length)
    with recorded(routers) as calls:
        wanted = expected(oracle, tokens)
    chosen = torch.stack([call.output[-1].view(length, k) for call in calls.values()])
    harness = Harness(Model.load(tmp_path, dtype="float32", device="cpu"), 1, length, routed_tokens=length)
    logits = harness.feed({0: tokens})[0]
    assert torch.equal(harness.cache.recorded[:, :length].long(), chosen)
    assert (logits - wanted).abs().max() < (1e-3 if spec == "qwen3_5_moe" else 1e-4)
    if k == 1:
        assert all(len(of_router.unique()) == 1 for of_router in chosen)


@pytest.mark.parametrize("page", [8, 16])
@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_windows_around_a_page_give_the_tokens_of_transformers(page, beyond, tmp_path):
    window = page + beyond
    oracle = reference(tiny_config("gpt_oss", sliding_window=window))
    save(oracle, tmp_path)
    llm = LLM(str(tmp_path), device="cpu", dtype="float32", skip_tokenizer_init=True, max_model_len=96, max_num_seqs=4,
              block_size=page, num_gpu_blocks_override=128 // page * 2, max_num_batched_tokens=2 * page + 1)  # fmt: skip
    lengths = sorted({1, page - 1, page, page + 1, window - 1, window + 1, 2 * page, 2 * page + 1, 3 * page - 1})
    prompts = [prompt(length, seed=length) for length in lengths]
    params = SamplingParams(temperature=0, max_tokens=2 * page, ignore_eos=True)
    pairs = [tokens for tokens in prompts for _ in range(2)]  # the second of a pair has the first one's blocks
    outputs = llm.generate(pairs, params, use_tqdm=False)
    assert sum(output.num_cached_tokens for output in outputs) > 0
    for tokens, output in zip(pairs, outputs):
        got = output.outputs[0].token_ids
        assert expected(oracle, tokens + got)[len(tokens) - 1 : -1].argmax(-1).tolist() == got
