"""Weights from another process: a trainer and an engine, two real processes over gloo."""

from __future__ import annotations

import asyncio

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tiny import expected, prompt, reference, tiny_config

from flexgen.runtime.async_engine import AsyncEngine
from flexgen.runtime.llm import LLM
from flexgen.runtime.loading.remote import Header, buckets, send_weights
from flexgen.runtime.loading.updates import UpdateError
from flexgen.verify.harness import Harness

TOKENS = prompt(24)
SIZES = {"max_model_len": 64, "num_gpu_blocks_override": 64, "max_num_seqs": 4, "dtype": "float32", "device": "cpu"}


def trained():
    return reference(tiny_config("llama", tie_word_embeddings=True), seed=5)


def send(**options):
    send_weights(trained().state_dict().items(), source=0, engine=1, bucket_bytes=20_000, **options)


def trainer(rank, store, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=2)
    send()
    try:
        send_weights([("model.norm.weight", torch.ones(64)), ("model.norm.wait", torch.ones(64))], source=0, engine=1)
    except UpdateError as error:
        assert "took none of 2 tensors: model.norm.wait is no weight" in str(error), error
    else:
        raise AssertionError("an unknown name was sent")
    for _ in range(2):
        assert send_weights([("model.norm.weight", torch.ones(64))], source=0, engine=1) == 1
    dist.barrier()
    dist.destroy_process_group()


def engine(rank, store, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=1, world_size=2)
    llm = LLM(folder, skip_tokenizer_init=True, **SIZES)
    model = llm.llm_engine.model
    addresses = [getattr(layer, weight.role).data_ptr() for layer, weight, _ in model.storages()]
    done = llm.receive_weights(0)
    assert done.counts["qkv"] == 3 * len(model.layers) and done.counts["embed_tokens"] == 1 and done.version == 1
    wanted = expected(trained(), TOKENS)
    assert (Harness(model, page_size=16).feed({0: TOKENS})[0] - wanted).abs().max() < 1e-4
    try:
        llm.receive_weights(0)
    except UpdateError as error:
        assert "model.norm.wait is no weight" in str(error), error
    else:
        raise AssertionError("an unknown name was taken")
    assert model.weight_version == 1 and not model.missing_weights
    assert llm.receive_weights(0).counts == {"norm": 1} and bool((model.weights.norm == 1).all())
    assert addresses == [getattr(layer, weight.role).data_ptr() for layer, weight, _ in model.storages()]
    served = AsyncEngine(folder, skip_tokenizer_init=True, **SIZES)
    assert asyncio.run(served.receive_weights(0)).counts == {"norm": 1}
    served.close()
    dist.barrier()
    dist.destroy_process_group()


def test_a_trainer_sends_and_an_engine_takes_what_fits(tmp_path):
    folder = tmp_path / "base"
    from flexgen.verify.reference import save

    save(reference(tiny_config("llama", tie_word_embeddings=True)), folder)
    context = mp.get_context("spawn")
    processes = [context.Process(target=run, args=(rank, tmp_path / "store", folder)) for rank, run in enumerate((trainer, engine))]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]


def test_buckets_hold_what_fits_and_a_large_tensor_alone():
    headers = [Header(str(index), (size,), torch.uint8) for index, size in enumerate((16, 10, 16, 90, 1))]
    assert [[each.name for each in bucket] for bucket in buckets(headers, 48)] == [["0", "1", "2"], ["3"], ["4"]]
    assert [header.nbytes for header in headers] == [16, 16, 16, 96, 16]
