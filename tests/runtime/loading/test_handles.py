"""Weights by handle from a process that goes on living: CUDA IPC, and shared memory of the host."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.multiprocessing as mp

from flexgen.runtime.llm import LLM
from flexgen.runtime.loading.handles import open_handles, weight_handles
from flexgen.runtime.loading.updates import UpdateError
from flexgen.verify.harness import Harness
from tests.tiny import expected, prompt, reference, tiny_config

TOKENS = prompt(24)


def trained():
    return reference(tiny_config("llama", tie_word_embeddings=True), seed=5)


def trainer(pipe, device):
    """Send handles of all weights, then of one that is wrong, and live until the engine is done."""
    torch.set_num_threads(1)
    model = trained().to(device)
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    pipe.send(weight_handles(model.state_dict().items()))
    pipe.send(weight_handles([("model.norm.wait", torch.ones(64, device=device))]))
    assert pipe.recv() == "done"
    for name, tensor in model.state_dict().items():
        assert tensor.data_ptr() == before[name][0] and torch.equal(tensor, before[name][1]), name


def takes_a_trainers_weights(folder, device):
    """An engine in this process, a trainer in another."""
    from flexgen.verify.reference import save

    save(reference(tiny_config("llama", tie_word_embeddings=True)), folder)
    context = mp.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=trainer, args=(other, device))
    process.start()
    sizes = {"max_model_len": 64, "num_gpu_blocks_override": 64, "max_num_seqs": 4}
    llm = LLM(folder, skip_tokenizer_init=True, dtype="float32", device=device, **sizes)
    model = llm.llm_engine.model
    pairs = open_handles(pipe.recv())
    assert {tensor.device.type for _, tensor in pairs} == {device} and "lm_head.weight" not in dict(pairs)
    done = llm.load_weights(pairs)
    assert done.counts["qkv"] == 3 * len(model.layers) and done.counts["embed_tokens"] == 1 and done.version == 1
    with pytest.raises(UpdateError, match=r"model\.norm\.wait is no weight"):
        llm.load_weights(open_handles(pipe.recv()))
    assert model.weight_version == 1 and not model.missing_weights
    logits = Harness(model, page_size=16).feed({0: TOKENS})[0].cpu()
    assert (logits - expected(trained(), TOKENS)).abs().max() < 1e-4
    del pairs
    pipe.send("done")
    process.join(120)
    assert process.exitcode == 0


def test_an_engine_takes_a_trainers_weights_by_handle(tmp_path):
    takes_a_trainers_weights(tmp_path / "base", "cpu")


def test_handles_are_of_tensors_with_numbers():
    with pytest.raises(UpdateError, match="x is on the meta device"):
        weight_handles([("x", torch.ones(2, device="meta"))])
    shared = torch.ones(4)
    handles = weight_handles([("a", shared), ("b", shared)])
    assert [name for name, _ in pickle.loads(handles)] == ["a"] and not shared.is_shared()
