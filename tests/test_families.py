"""Every family's tiny model through the whole engine, with pages so few that requests are preempted: transformers' greedy tokens."""

from __future__ import annotations

import pytest
import torch
from tiny import expected, prompt, saved

from flexgen import LLM, SamplingParams
from flexgen.errors import ConfigError
from flexgen.runtime.loading.rope import Rope

FAMILIES = [
    *("apertus", "bloom", "cohere2", "ernie4_5", "falcon", "falcon_new", "gemma", "gemma2", "gemma3", "gpt2", "gpt_neox"),
    *("granite", "ministral3", "mistral", "nemotron", "olmo2", "opt", "phi3", "qwen2", "smollm3", "starcoder2"),
]


@pytest.mark.parametrize("spec", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(spec):
    torch.set_num_threads(1)
    reference, folder = saved(spec)
    options = {"max_model_len": 64, "block_size": 8, "num_gpu_blocks_override": 14, "max_num_seqs": 4}
    llm = LLM(str(folder), dtype="float32", device="cpu", skip_tokenizer_init=True, **options)
    prompts = [prompt(length, seed=length) for length in (20, 13, 30)]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    results = llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], params, use_tqdm=False)
    for tokens, result in zip(prompts, results, strict=True):
        got = list(result.outputs[0].token_ids)
        assert got == expected(reference, tokens + got)[len(tokens) - 1 : -1].argmax(-1).tolist()


def test_longrope_takes_the_factors_of_the_engines_length():
    table = {"rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}
    rope = Rope.bind(table | {"original_max_position_embeddings": 8}, types=("longrope",), head_dim=4, max_position=32)
    short, long = (rope.tables(length, torch.float32, "cpu")[1][1] for length in (8, 9))
    assert not torch.allclose(short, long)
    assert torch.allclose(long[0], torch.tensor(1 / 3).sin() * (1 + torch.tensor(4.0).log() / torch.tensor(8.0).log()).sqrt())


def test_dynamic_ropes_are_refused_by_name():
    with pytest.raises(ConfigError, match="'dynamic', which is not implemented"):
        Rope.bind({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, types=("default",), head_dim=4, max_position=8)
