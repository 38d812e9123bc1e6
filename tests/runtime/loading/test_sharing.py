"""One copy of the weights: a live transformers model and an engine on the same storage, while it trains."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from tiny import expected, prompt, reference, tiny_config
from torch import nn

from flexgen import LLM, SamplingParams
from flexgen.runtime.loading.sharing import SharingError, share
from flexgen.runtime.loading.updates import UpdateError
from flexgen.verify.harness import Harness
from flexgen.verify.reference import save

FAMILIES = ("llama", "qwen3_moe", "gpt_oss", "gemma4_moe", "gemma4_e", "qwen3_5", "qwen3_5_moe")
TOLERANCE = {"qwen3_5": 1e-3, "qwen3_5_moe": 1e-3}
"""The delta rule: transformers' chunked form and a recurrence differ by this much."""
TOKENS = prompt(24)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SIZES = {"max_model_len": 64, "num_gpu_blocks_override": 64, "max_num_seqs": 4}


def assert_same(shared, trained, spec):
    got = Harness(shared.model, page_size=16).feed({0: TOKENS})[0]
    assert (got - expected(trained, TOKENS)).abs().max() < TOLERANCE.get(spec, 1e-4)


def train(trained, optimizer, steps=2):
    trained.train()
    for _ in range(steps):
        loss = trained(torch.tensor([TOKENS]), labels=torch.tensor([TOKENS])).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    trained.eval()


def answer(engine):
    return engine.generate([TOKENS], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def bytes_of(tensors):
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def storages(model):
    return [getattr(layer, weight.role) for layer, weight, _ in model.storages()]


@pytest.mark.parametrize("spec", FAMILIES)
def test_training_is_seen_at_once_and_there_is_one_copy(spec):
    trained = reference(tiny_config(spec))
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.01)
    size = bytes_of(trained.state_dict().values())
    shared = share(trained)
    assert_same(shared, trained, spec)
    addresses = [t.data_ptr() for t in storages(shared.model)]
    before = Harness(shared.model, page_size=16).feed({0: TOKENS})[0]
    trained.gradient_checkpointing_enable()
    train(trained, optimizer)
    assert_same(shared, trained, spec)
    assert (Harness(shared.model, page_size=16).feed({0: TOKENS})[0] - before).abs().max() > 1e-2
    assert addresses == [t.data_ptr() for t in storages(shared.model)]
    both = [*trained.state_dict().values(), *storages(shared.model)]
    assert bytes_of(both) == size == shared.nbytes
    assert not any(tensor.is_inference() or tensor.requires_grad for tensor in storages(shared.model))


@pytest.mark.parametrize("spec", ["llama", "qwen3_moe", "gemma4_e"])
def test_saving_and_loading_a_state_keep_the_copy_one(spec, tmp_path):
    trained, source = reference(tiny_config(spec)), reference(tiny_config(spec), seed=3)
    wanted = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    shared = share(trained)
    save(trained, tmp_path / "now")
    save(reference(tiny_config(spec)), tmp_path / "plain")
    ours, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("now", "plain"))
    assert ours.keys() == plain.keys() and all(torch.equal(ours[name], plain[name]) for name in plain)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in trained.state_dict().items())
    trained.load_state_dict(source.state_dict())
    assert shared.check().total() == len(shared.tensors)
    assert_same(shared, source, spec)


def test_an_engine_on_a_model_in_training():
    trained = reference(tiny_config("llama"))
    engine = LLM.from_model(trained, **SIZES)
    before = answer(engine)
    assert answer(engine) == before
    hits = engine.metrics()["prefix_cache_hit_tokens"]
    assert hits > 0
    train(trained, torch.optim.AdamW(trained.parameters(), lr=0.05))
    counts = engine.weights_changed()
    assert counts["qkv"] == 3 * len(trained.model.layers) and engine.llm_engine.model.weight_version == 1
    after = answer(engine)
    assert after != before and engine.metrics()["prefix_cache_hit_tokens"] == hits
    assert after == answer(LLM.from_model(trained, **SIZES))
    assert "shared with a trainer" in engine.report()
    with pytest.raises(NotImplementedError, match="has none"):
        engine.reload_weights()


def test_a_wider_head_of_a_shared_model_follows():
    trained = reference(tiny_config("llama")).to(torch.bfloat16)
    engine = LLM.from_model(trained, head_dtype=torch.float32, **SIZES)
    with torch.no_grad():
        trained.lm_head.weight.mul_(2)
    engine.weights_changed()
    assert torch.equal(engine.llm_engine.model.weights.lm_head, trained.lm_head.weight.float())


def test_under_peft_the_base_layers_are_shared(tmp_path):
    from peft import LoraConfig, get_peft_model

    trained = reference(tiny_config("llama"))
    wrapped = get_peft_model(trained, LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], r=4, init_lora_weights=False))
    shared = share(wrapped)
    with wrapped.disable_adapter():
        assert_same(shared, wrapped, "llama")
    base = [tensor.clone() for tensor in storages(shared.model)]
    train(wrapped, torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=0.01))
    assert all(torch.equal(one, other) for one, other in zip(base, storages(shared.model), strict=True))
    wrapped.merge_adapter()
    shared.check()
    assert_same(shared, wrapped, "llama")
    wrapped.unmerge_adapter()
    wrapped.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()


def test_experts_under_peft_are_shared():
    from peft import LoraConfig, get_peft_model

    trained = reference(tiny_config("qwen3_moe"))
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    shared = share(get_peft_model(trained, LoraConfig(target_modules=["q_proj"], target_parameters=names, r=2)))
    assert_same(shared, trained, "qwen3_moe")


def swapped(model):
    model.model.layers[0].mlp.down_proj.weight = nn.Parameter(model.model.layers[0].mlp.down_proj.weight.t().contiguous().t())


def modules_to_save(model):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], r=2))


def half(model):
    model.model.layers[1].self_attn.q_proj.half()


def to_meta(model):
    model.model.layers[1].self_attn.q_proj.to("meta")


def extra(model):
    model.model.layers[1].strange = nn.Linear(2, 2)


def lacking(model):
    del model.model.layers[1].self_attn.q_proj.weight


REFUSED = {
    swapped: r"layers\.0\.mlp\.down_proj\.weight is not contiguous\. A copy of it \(\d+ bytes",
    modules_to_save: "modules_to_save",
    half: r"layers\.1\.self_attn\.q_proj\.weight is torch\.float16, and the engine keeps it as torch\.float32",
    to_meta: r"layers\.1\.self_attn\.q_proj\.weight is on the meta device",
    extra: r"layers\.1\.strange\.weight is no weight of llama",
    lacking: r"the model lacks layers\.1\.self_attn\.q_proj\.weight",
}


@pytest.mark.parametrize("edit", REFUSED, ids=lambda edit: edit.__name__)
def test_what_cannot_be_shared_is_named_and_nothing_is_changed(edit):
    trained = reference(tiny_config("llama"))
    trained = edit(trained) or trained
    before = {name: tensor.data_ptr() for name, tensor in trained.state_dict().items()}
    with pytest.raises(SharingError, match=REFUSED[edit]):
        share(trained)
    assert before == {name: tensor.data_ptr() for name, tensor in trained.state_dict().items()}


def test_shards_are_refused(tmp_path):
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        trained = reference(tiny_config("llama"))
        fully_shard(trained, mesh=distributed.init_device_mesh("cpu", (1,)))
        with pytest.raises(SharingError, match="shard of a distributed tensor"):
            share(trained)
    finally:
        distributed.destroy_process_group()


def test_a_tensor_that_moved_is_named():
    trained = reference(tiny_config("llama"))
    engine = LLM.from_model(trained, **SIZES)
    trained.model.norm.weight.data = trained.model.norm.weight.data.clone()
    with pytest.raises(SharingError, match=r"model\.norm\.weight: the trainer's tensor is no longer"):
        engine.weights_changed()


def test_untied_tensors_of_a_tied_model_are_refused():
    trained = reference(tiny_config("qwen3"))
    trained.lm_head.weight = nn.Parameter(trained.lm_head.weight.detach().clone())
    with pytest.raises(SharingError, match="tie_weights"):
        share(trained)


def test_a_load_that_failed_half_way_is_not_made_whole_by_a_step_of_the_trainer():
    trained = reference(tiny_config("llama"))
    engine = LLM.from_model(trained, **SIZES)
    state = {name: tensor.detach().clone() for name, tensor in trained.state_dict().items()}

    def broken():
        yield from list(state.items())[:3]
        raise RuntimeError("the sender went away")

    with pytest.raises(RuntimeError, match="went away"):
        engine.load_weights(broken())
    engine.weights_changed()
    with pytest.raises(UpdateError, match="mixture until these have come"):
        answer(engine)
    engine.load_weights(state)
    assert len(answer(engine)) == GREEDY.max_tokens
