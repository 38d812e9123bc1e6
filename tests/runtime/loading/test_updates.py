"""Weights that change under an engine that serves them: what an update may be, and that none leaves a mixture that answers."""

from __future__ import annotations

import asyncio
import copy
import dataclasses

import pytest
import torch
from safetensors.torch import load_file
from tiny import expected, prompt, reference, saved, tiny_config

from flexgen import LLM, AsyncEngine, SamplingParams
from flexgen.runtime.loading.checkpoint import CheckpointError
from flexgen.runtime.loading.model import Model
from flexgen.runtime.loading.updates import UpdateError, Updater
from flexgen.verify.harness import Harness

FAMILIES = ("llama", "qwen3_moe", "gpt_oss", "gemma4_moe", "gemma4_e", "qwen3_5")
TOLERANCE = {"qwen3_5": 1e-3}
"""The delta rule: transformers' chunked form and a recurrence differ by this much."""
TOKENS = prompt(24)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def loaded(spec, **arguments):
    return Model.load(saved(spec)[1], dtype="float32", device="cpu", **arguments)


def other(spec):
    return reference(tiny_config(spec), seed=5)


def named(model):
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def places(model):
    return [getattr(layer, weight.role).data_ptr() for layer, weight, _ in model.storages()]


def assert_is(model, trained, spec):
    got = Harness(model, page_size=16).feed({0: TOKENS})[0]
    assert (got - expected(trained, TOKENS)).abs().max() < TOLERANCE.get(spec, 1e-4)


def llm(spec="llama", **arguments):
    sizes = {"max_model_len": 64, "num_gpu_blocks_override": 64, "max_num_seqs": 4}
    return LLM(saved(spec)[1], dtype="float32", device="cpu", skip_tokenizer_init=True, **sizes | arguments)


def answer(engine, length=24):
    (output,) = engine.generate([TOKENS[:length]], GREEDY, use_tqdm=False)
    return output.outputs[0].token_ids


@pytest.mark.parametrize("spec", FAMILIES)
def test_an_update_makes_the_new_model_in_place(spec):
    model, trained = loaded(spec), other(spec)
    before, addresses = model.weight_version, places(model)
    update = Updater(model).load(list(named(trained).items()))
    assert_is(model, trained, spec)
    assert update.counts.total() == len(named(trained)) and not update.skipped
    assert places(model) == addresses
    assert update.version == model.weight_version == before + 1


@pytest.mark.parametrize("spec", FAMILIES)
def test_names_as_a_checkpoint_has_them_and_a_lazy_source(spec, tmp_path):
    from flexgen.verify.reference import save

    trained = other(spec)
    save(trained, tmp_path)
    tensors, model = load_file(tmp_path / "model.safetensors"), loaded(spec)
    assert Updater(model).load(iter(tensors.items())).counts.total() == len(tensors)
    assert_is(model, trained, spec)
    again = loaded(spec)
    assert Updater(again).load(tmp_path).counts.total() == len(tensors)
    assert_is(again, trained, spec)


@pytest.mark.parametrize("form", ["base_model.model.{}", "base_model.model.base_model.model.{}", "_fsdp_wrapped_module.{}"])
def test_names_of_wrapped_models(form):
    model, trained = loaded("llama"), other("llama")
    Updater(model).load([(form.format(name).replace("_proj.", "_proj.base_layer."), each) for name, each in named(trained).items()])
    assert_is(model, trained, "llama")


@pytest.mark.parametrize("prefix", ["model.language_model.", ""])
def test_prefixes_that_the_spec_knows(prefix):
    model, trained = loaded("gemma4_e"), other("gemma4_e")
    names = {name.replace("model.", prefix, 1): each for name, each in named(trained).items() if name != "lm_head.weight"}
    update = Updater(model).load([*names.items(), ("model.vision_tower.patch.weight", torch.ones(2))])
    assert update.skipped == {"model.vision_tower.*": 1}
    assert_is(model, trained, "gemma4_e")


def test_a_part_changes_that_part_alone():
    model, source = loaded("llama"), other("llama")
    name = "model.layers.1.self_attn.k_proj.weight"
    rows = model.layers[1].qkv.clone()
    update = Updater(model).load([(name, named(source)[name].double())])
    assert update.counts == {"qkv": 1}
    wanted, start = copy.deepcopy(saved("llama")[0]), named(source)["model.layers.1.self_attn.q_proj.weight"].shape[0]
    wanted.load_state_dict({name: named(source)[name]}, strict=False)
    assert torch.equal(model.layers[1].qkv[:start], rows[:start]) and not torch.equal(model.layers[1].qkv, rows)
    assert_is(model, wanted, "llama")


@pytest.mark.parametrize("spec", ["llama", "gemma4_e"])
def test_a_head_of_another_dtype_follows(spec):
    trained = other(spec)
    model, fresh = (Model.load(saved(spec)[1], dtype="bfloat16", device="cpu", head_dtype="float32") for _ in range(2))
    head, place = model.weights.lm_head, model.weights.lm_head.data_ptr()
    old = head.clone()
    Updater(model).load(named(trained))
    tensors = named(trained)
    wanted = tensors["model.embed_tokens.weight" if spec == "gemma4_e" else "lm_head.weight"].bfloat16().float()
    assert torch.equal(model.weights.lm_head, wanted) and model.weights.lm_head.data_ptr() == place
    assert not torch.equal(old, wanted) and torch.equal(fresh.weights.lm_head, old)


def test_a_tied_head_may_come_along_if_it_is_the_embedding():
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    model, values = loaded("qwen3"), named(other("qwen3"))[embedding]
    assert Updater(model).load([(head, values)]).counts == {"embed_tokens": 1}
    assert torch.equal(model.weights.embed_tokens, values)
    for pair in ((embedding, head), (head, embedding)):
        Updater(model).load([(pair[0], values), (pair[1], values.clone())])
        with pytest.raises(UpdateError, match=r"although config\.json ties them"):
            Updater(model).load([(pair[0], values), (pair[1], values + 1)])
    assert torch.equal(model.weights.embed_tokens, values)


Q = "model.layers.1.self_attn.q_proj.weight"
EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"
FLAWS = {
    "unknown": (lambda t: [*t, ("model.layers.9.x", torch.ones(1))], r"model\.layers\.9\.x is no weight"),
    "twice": (lambda t: [*t, t[-1]], "give each weight once"),
    "twice by another name": (lambda t: [*t, ("base_model.model." + t[0][0], t[0][1])], "give each weight once"),
    "expert and all experts": (lambda t: [*t, (EXPERT, torch.ones(1, 1))], "has shape"),
    "shape": (lambda t: [*t[:-1], (t[-1][0], torch.ones(3))], r"has shape \(3,\); the spec"),
    "dtype": (lambda t: [*t[:-1], (t[-1][0], t[-1][1].to(torch.int8))], "int8"),
    "adapter": (lambda t: [*t, ("model.layers.0.self_attn.q_proj.lora_A.default.weight", torch.ones(1))], "merge the adapter"),
    "meta": (lambda t: [*t[:-1], (t[-1][0], t[-1][1].to("meta"))], "meta device"),
    "no pair": (lambda t: [*t, "x"], "pairs of name and tensor"),
    "no tensor": (lambda t: [*t, ("x", 1)], "pairs of name and tensor"),
    "nothing": (lambda t: [], "no weight of the model"),
}  # fmt: skip


@pytest.mark.parametrize("flaw", FLAWS)
def test_flaws_are_named_and_change_nothing(flaw):
    edit, message = FLAWS[flaw]
    model = loaded("qwen3_moe")
    before = {id(storage): storage.clone() for layer, weight, _ in model.storages() for storage in [getattr(layer, weight.role)]}
    with pytest.raises(UpdateError, match=message):
        Updater(model).load(edit(list(named(other("qwen3_moe")).items())))
    assert model.weight_version == 0 and not model.missing_weights
    assert all(torch.equal(getattr(layer, weight.role), before[id(getattr(layer, weight.role))]) for layer, weight, _ in model.storages())


def test_an_expert_beside_all_experts_is_twice():
    model, tensors = loaded("qwen3_moe"), named(other("qwen3_moe"))
    (stacked,) = (name for name in tensors if name.startswith("model.layers.0.") and name.endswith("experts.gate_up_proj"))
    single = tensors[stacked][3].chunk(2)[1]
    Updater(model).load([(EXPERT, single)])
    with pytest.raises(UpdateError, match="give each weight once"):
        Updater(model).load([(stacked, tensors[stacked]), (EXPERT, single)])


def broken(tensors):
    yield from tensors
    raise ConnectionError("the trainer went away")


@pytest.mark.parametrize("ending", [broken, lambda tensors: [*tensors, ("model.strange", torch.ones(1))].__iter__()])
def test_a_load_that_fails_half_way_never_answers(ending):
    engine, trained = llm(), other("llama")
    tensors = list(named(trained).items())
    with pytest.raises((ConnectionError, UpdateError)):
        engine.load_weights(ending(tensors[:5]))
    with pytest.raises(UpdateError, match=r"mixture until these have come: .*layers\.0"):
        answer(engine)
    engine.load_weights(tensors[:-1])
    with pytest.raises(UpdateError, match=rf"have come: {tensors[-1][0].removeprefix('model.')}\."):
        answer(engine)
    engine.load_weights(tensors[-1:])
    fresh = llm()
    fresh.load_weights(tensors)
    assert answer(engine) == answer(fresh)


def test_a_lazy_load_whose_first_tensor_is_wrong_keeps_the_old_model():
    engine = llm()
    before = answer(engine)
    with pytest.raises(UpdateError):
        engine.load_weights(iter([("model.strange", torch.ones(1))]))
    assert answer(engine) == before


def test_a_checkpoint_must_be_complete(tmp_path):
    from safetensors.torch import save_file

    tensors = load_file(saved("llama")[1] / "model.safetensors")
    tensors.pop(Q)
    save_file(tensors, tmp_path / "model.safetensors")
    engine = llm()
    before = answer(engine)
    with pytest.raises(UpdateError, match=r"lacks layers\.1\.self_attn\.q_proj\.weight"):
        engine.load_weights(tmp_path)
    with pytest.raises(CheckpointError):
        engine.load_weights(tmp_path / "nowhere")
    assert answer(engine) == before


def test_cached_prefixes_are_of_their_weights_and_reload_brings_the_old_ones_back():
    engine, trained = llm(), other("llama")
    before = answer(engine)
    assert answer(engine) == before and engine.metrics()["prefix_cache_hit_tokens"] > 0
    hits = engine.metrics()["prefix_cache_hit_tokens"]
    model = engine.llm_engine.model_executor.driver_worker.model_runner.model
    for name, tensor in named(trained).items():
        model.load_weights([(name, tensor)])
    after = answer(engine)
    assert engine.metrics()["prefix_cache_hit_tokens"] == hits
    fresh = llm()
    fresh.load_weights(trained.named_parameters())
    assert after == answer(fresh) != before
    engine.reload_weights()
    assert answer(engine) == before


@pytest.mark.parametrize("on_running", ["wait", "abort", "raise", "maybe"])
def test_what_runs_is_finished_aborted_or_an_error(on_running):
    engine, trained = llm(), other("llama")
    before = answer(engine)
    stream = engine.stream([TOKENS], GREEDY)
    next(stream)
    if on_running in ("raise", "maybe"):
        with pytest.raises(Exception, match="1 answers are running" if on_running == "raise" else "must be one of"):
            engine.load_weights(named(trained), on_running)
        *_, last = stream
        assert last.outputs[0].token_ids == before
        return
    engine.load_weights(named(trained), on_running)
    *_, last = stream
    assert last.finished and last.outputs[0].finish_reason == ("abort" if on_running == "abort" else "length")
    assert last.outputs[0].token_ids == before[: len(last.outputs[0].token_ids)]
    assert answer(engine) != before


def test_what_is_paused_goes_on_with_the_new_weights():
    """Tokens so far stay, and the others are those that the new weights give after them."""
    engine, fresh, trained = llm(), llm(), other("llama")
    fresh.load_weights(named(trained))
    params = dataclasses.replace(GREEDY, max_tokens=20, logprobs=1)
    streams = [engine.stream([TOKENS[:length]], params) for length in (len(TOKENS), 16, 1)]
    for stream in streams:
        next(stream)
    engine.load_weights(named(trained), "pause")
    paused = {tuple(request.prompt): list(request.outputs) for request in engine.llm_engine.scheduler.waiting}
    assert len(paused) == 3 and all(0 < len(tokens) < 20 for tokens in paused.values())
    for prompt_ids, stream in zip(paused, streams, strict=True):
        kept, end = paused[prompt_ids], list(stream)[-1].outputs[0]
        after = dataclasses.replace(params, max_tokens=20 - len(kept))
        (wanted,) = fresh.generate([[*prompt_ids, *kept]], after, use_tqdm=False)
        assert end.token_ids == kept + wanted.outputs[0].token_ids and len(end.logprobs) == 20
    assert answer(engine) == answer(fresh)


def test_what_is_paused_ends_where_the_update_fails_half_way():
    engine, trained = llm(), named(other("llama"))
    stream = engine.stream([TOKENS], GREEDY)
    next(stream)

    def broken():
        yield from list(trained.items())[:3]
        raise RuntimeError("the trainer died")

    with pytest.raises(RuntimeError, match="the trainer died"):
        engine.load_weights(broken(), "pause")
    with pytest.raises(UpdateError, match="failed half-way"):
        list(stream)
    assert not engine.llm_engine.unfinished
    engine.load_weights(trained)
    assert len(answer(engine)) == GREEDY.max_tokens


@pytest.mark.parametrize("on_running", ["wait", "abort"])
def test_an_async_engine_gives_its_callers_what_an_update_ended(on_running):
    trained, wanted = other("llama"), answer(llm())

    async def run():
        engine = AsyncEngine(saved("llama")[1], dtype="float32", device="cpu", skip_tokenizer_init=True, max_model_len=64,
                             num_gpu_blocks_override=64, max_num_seqs=4)  # fmt: skip
        outputs = engine.generate({"prompt_token_ids": TOKENS}, GREEDY, "a")
        first = await anext(outputs)
        update = await engine.load_weights(named(trained), on_running)
        rest = [first] + [output async for output in outputs]
        engine.close()
        return update, rest[-1].outputs[0]

    update, got = asyncio.run(run())
    assert update.version == 1 and got.token_ids == wanted[: len(got.token_ids)]
    assert got.finish_reason == ("length" if on_running == "wait" else "abort")
