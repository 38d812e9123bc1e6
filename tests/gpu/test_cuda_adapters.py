"""Adapters on a CUDA device: what graphs replay follows merges and slots, and equals transformers with PEFT."""

import pytest
import torch

from flexgen.runtime.llm import LLM
from flexgen.runtime.loading.model import Model
from flexgen.runtime.requests.params import LoRARequest, SamplingParams
from tests.runtime.loading.adapters import wrapped
from tests.runtime.loading.test_handles import takes_a_trainers_weights
from tests.tiny import expected, prompt, saved


def test_a_trainers_weights_come_by_cuda_ipc(tmp_path):
    takes_a_trainers_weights(tmp_path / "base", "cuda")


SPECS = ["llama", "qwen3_moe", "gpt_oss", "gemma4_moe"]
TOKENS = prompt(24)


def engine(spec, **options):
    model = Model.load(saved(spec)[1], dtype="float32", device="cuda")
    sizes = {"max_model_len": 96, "max_num_seqs": 8, "num_gpu_blocks_override": 64, "cudagraph_capture_sizes": [1, 2, 4, 8]}
    return LLM(model, skip_tokenizer_init=True, **sizes, **options)


def greedy(llm, count=1, loras=None):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return [each.outputs[0].token_ids for each in llm.generate([TOKENS] * count, params, use_tqdm=False, lora_request=loras)]


def follows(peft, tokens):
    return expected(peft, TOKENS + tokens[:-1])[len(TOKENS) - 1 :].argmax(-1).tolist() == tokens


@pytest.mark.parametrize("spec", SPECS)
def test_graphs_read_what_is_merged(spec):
    torch._dynamo.reset()
    peft, llm = wrapped(spec), engine(spec)
    plain = greedy(llm)
    llm.load_adapter(peft)
    assert follows(peft, greedy(llm)[0])
    addresses = {name: tensor.data_ptr() for name, tensor in llm.llm_engine.runner.step.tensors()}
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                parameter.mul_(-3)
    llm.refresh_adapter()
    assert follows(peft, greedy(llm)[0])
    llm.unload_adapter()
    assert greedy(llm) == plain
    assert addresses == {name: tensor.data_ptr() for name, tensor in llm.llm_engine.runner.step.tensors()}
    assert llm.llm_engine.runner.graphs.failures == []


@pytest.mark.parametrize("spec", SPECS)
def test_graphs_read_the_slots_of_a_mixed_batch(spec):
    torch._dynamo.reset()
    pefts = [wrapped(spec), wrapped(spec, r=2, lora_alpha=9), wrapped(spec, r=5, lora_alpha=20)]
    loras = [None, *(LoRARequest(f"adapter {n}", n, lora_model=peft) for n, peft in enumerate(pefts, 1))]
    llm = engine(spec, enable_lora=True, max_loras=2, max_lora_rank=10)
    plain = greedy(engine(spec))[0]
    for _ in range(2):
        none, *others = greedy(llm, 8, loras * 2)[:4]
        assert none == plain and all(map(follows, pefts, others))
    assert llm.llm_engine.runner.graphs.failures == []


def test_graphs_read_the_slots_of_the_embedding_and_the_head():
    torch._dynamo.reset()
    ends = ["q_proj", "embed_tokens", "lm_head"]
    pefts = [wrapped("llama", target_modules=ends, r=rank) for rank in (2, 5)]
    loras = [None, *(LoRARequest(f"adapter {n}", n, lora_model=peft) for n, peft in enumerate(pefts, 1))]
    llm = engine("llama", enable_lora=True, max_loras=2, max_lora_rank=8, lora_target_modules=ends)
    plain = greedy(engine("llama"))[0]
    none, *others = greedy(llm, 6, loras * 2)[:3]
    assert none == plain and all(map(follows, pefts, others)) and others[0] != plain
    assert llm.llm_engine.runner.graphs.failures == []
