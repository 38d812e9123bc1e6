"""The engine on generated packages, against transformers' generate with the same settings."""

import pytest
import torch

from flexgen.runtime.llm import LLM
from flexgen.runtime.requests.params import SamplingParams
from tests.tiny import LEAST, SPECS, saved

torch.set_num_threads(1)
PROMPTS = [[3, 14, 15, 92, 65, 35], [9], list(range(2, 40)), [27, 18, 28]]


def oracle(model, prompt, count, **settings):
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "max_new_tokens": count, "pad_token_id": 0, **settings}
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return out[0, len(prompt) :].tolist()


def engine(folder, **options):
    options = {"max_num_seqs": 3, "block_size": 4, "num_gpu_blocks_override": 40, "max_num_batched_tokens": 16, **options}
    return LLM(str(folder), dtype="float32", device="cpu", skip_tokenizer_init=True, max_model_len=80, **options)


@pytest.mark.parametrize("spec", SPECS)
def test_greedy_tokens_of_every_spec(spec):
    model, folder = saved(spec)
    llm = engine(folder, num_gpu_blocks_override=16)  # the longest needs 13: chunks, preemption and reuse all happen
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    least = LEAST.get(spec, 0)
    prompts = [[*prompt, *range(40, 40 + least - len(prompt))] for prompt in PROMPTS]
    for _ in range(2):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for prompt, output in zip(prompts, outputs):
            assert output.outputs[0].token_ids == oracle(model, prompt, 12)
    assert llm.metrics()["free_blocks"] == llm.metrics()["total_blocks"]


def test_penalties_and_stops_are_those_of_transformers():
    model, folder = saved("llama")
    llm = engine(folder)
    free = oracle(model, PROMPTS[0], 20)
    eos = [free[4], free[9]]
    cases = [
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"stop_token_ids": eos}, {"eos_token_id": eos}),
        ({"stop_token_ids": eos, "min_tokens": 8}, {"eos_token_id": eos, "min_new_tokens": 8}),
        ({"stop_token_ids": eos, "min_tokens": 20, "repetition_penalty": 0.8},
         {"eos_token_id": eos, "min_new_tokens": 20, "repetition_penalty": 0.8}),
    ]  # fmt: skip
    params = [SamplingParams(temperature=0, max_tokens=20, **mine) for mine, _ in cases]
    outputs = llm.generate([PROMPTS[0]] * len(cases), params, use_tqdm=False)
    for output, (_, theirs) in zip(outputs, cases):
        assert output.outputs[0].token_ids == oracle(model, PROMPTS[0], 20, **theirs)


@pytest.mark.parametrize("spec", ["llama", "gemma4_moe", "qwen3_5"])
def test_logprobs_do_not_depend_on_chunks_blocks_or_neighbours(spec):
    model, folder = saved(spec)
    prompt = PROMPTS[2]
    params = SamplingParams(seed=1, max_tokens=10, logprobs=0, ignore_eos=True)
    results = []
    for sizes, neighbours in [
        ({"block_size": 16, "max_num_batched_tokens": 64}, []),
        ({"block_size": 128}, PROMPTS),
        ({"block_size": 4, "max_num_batched_tokens": 5}, [prompt] * 3),
    ]:
        outputs = engine(folder, **sizes).generate([*neighbours, prompt], params, use_tqdm=False)
        answer = outputs[-1].outputs[0]
        results.append((answer.token_ids, [entry[t].logprob for t, entry in zip(answer.token_ids, answer.logprobs)]))
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *results[0][0]]])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(results[0][0])[:, None])[:, 0].tolist()
    for tokens, logprobs in results:
        assert tokens == results[0][0] and logprobs == pytest.approx(expected, abs=1e-4)
