"""Adapters that requests bring: each request its own, in one batch, as if it ran alone on merged weights."""

from __future__ import annotations

import asyncio

import pytest
import torch
from runtime.loading.adapters import wrapped
from runtime.loading.test_adapters import TOLERANCE
from tiny import expected, prompt, reference, saved, tiny_config
from torch import nn

from flexgen import LLM, AsyncEngine, LoRARequest, SamplingParams
from flexgen.runtime.execution.regional import compile_layers
from flexgen.runtime.loading.attached import Attached
from flexgen.runtime.loading.lora import AdapterError
from flexgen.runtime.loading.model import Model
from flexgen.runtime.loading.sharing import share
from flexgen.verify.harness import Harness

FAMILIES = ("llama", "qwen3_moe", "gpt_oss", "gemma4_moe", "gemma4_e", "qwen3_5", "qwen3_5_moe")
MIXED = FAMILIES[:-1]
BOUND = {"qwen3_5": 2e-5}
"""Of a logprob, where it is not 1e-5. A preempted prompt is longer, and the delta rule then sums its state in other chunks."""
SIZES = {"max_model_len": 96, "num_gpu_blocks_override": 96, "max_num_seqs": 8, "dtype": "float32", "device": "cpu"}
ROOM = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 12}
TOKENS = prompt(24)


def logits(model):
    return Harness(model, page_size=16).feed({0: TOKENS})[0]


@pytest.mark.parametrize("spec", FAMILIES)
def test_attached_adapters_compute_what_peft_computes(spec):
    peft = wrapped(spec)
    model = share(peft).model
    plain = logits(model)
    room = Attached(model, 2, 6, 64)
    room.place(2, room.read(wrapped(spec, seed=3)))
    room.place(1, room.read(peft))
    assert torch.equal(logits(model), plain)
    room.slots_T.fill_(1)
    wanted = expected(peft, TOKENS)
    assert (logits(model) - wanted).abs().max() / wanted.abs().max() < TOLERANCE.get(spec, 1e-5)
    assert (wanted - plain).abs().max() > 1e-2
    only = wrapped(spec, seed=7, target_modules=["o_proj"], target_parameters=None)
    room.place(1, room.read(only))
    for key, (_, adapted) in room.weights.items():
        assert bool(adapted.b[0].any()) == (key[1] == "o")


ENDS = [("llama", False), ("llama", True), ("gemma4_e", True), ("gpt2", True)]


@pytest.mark.parametrize(("spec", "tied"), ENDS)
def test_the_embedding_and_the_head_may_have_room_too(spec, tied):
    """Tied or not: an adapter of one side leaves the other side as it is, as PEFT does. Tokens of none beside it are the base's."""
    make = lambda: reference(tiny_config(spec, tie_word_embeddings=tied))
    named = [(name.rpartition(".")[2], module) for name, module in make().named_modules()]
    embeddings = [name for name, module in named if isinstance(module, nn.Embedding) and name != "wpe"]
    for ends in (embeddings, ["lm_head"], [*embeddings, "lm_head"]):
        peft = wrapped(spec, model=make(), target_modules=ends)
        wanted = expected(peft, TOKENS)
        model = share(peft).model
        plain = logits(model)
        room = Attached(model, 2, 6, 64, ends)
        room.place(2, room.read(peft))
        assert torch.equal(logits(model), plain)
        room.slots_T.fill_(2)
        room.slots_R.fill_(2)
        assert (logits(model) - wanted).abs().max() / wanted.abs().max() < 1e-5
        assert (wanted - plain).abs().max() > 1e-2


def test_requests_bring_adapters_of_the_embedding_and_the_head(tmp_path):
    """In one batch with none, prompt logprobs included: each as alone on merged weights."""
    _, folder = saved("llama")
    ends = ["q_proj", "embed_tokens", "lm_head"]
    loras = [None, *(LoRARequest(str(n), n, lora_model=wrapped("llama", seed=0, r=n + 1, target_modules=ends)) for n in (1, 2))]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    llm = LLM(folder, skip_tokenizer_init=True, **SIZES, **ROOM, lora_target_modules=ends)
    merged = LLM(folder, skip_tokenizer_init=True, **SIZES)
    got = llm.generate([TOKENS] * 3, params, use_tqdm=False, lora_request=loras)
    scores = lambda output: torch.tensor([each[token].logprob for each, token in zip(output.prompt_logprobs[1:], TOKENS[1:])])
    for lora, output in zip(loras, got):
        if lora is not None:
            merged.load_adapter(lora.source)
        (wanted,) = merged.generate([TOKENS], params, use_tqdm=False)
        assert answers([output]) == answers([wanted])
        torch.testing.assert_close(logprobs(output), logprobs(wanted), atol=2e-5, rtol=0)
        torch.testing.assert_close(scores(output), scores(wanted), atol=2e-5, rtol=0)
        if lora is not None:
            merged.unload_adapter()
    assert len({tuple(logprobs(output).tolist()) for output in got}) == 3


@pytest.mark.parametrize("spec", ["llama", "qwen3_moe"])
def test_layers_compile_once_for_all_depths_with_room_for_adapters(spec):
    from torch._dynamo.utils import counters

    peft = wrapped(spec)
    model = share(peft).model
    room = Attached(model, 2, 6, 64)
    room.place(1, room.read(peft))
    room.slots_T[:12] = 1
    wanted = logits(model)
    torch._dynamo.reset()
    counters.clear()
    compile_layers(model, backend="eager")
    assert torch.equal(logits(model), wanted)
    room.place(2, room.read(wrapped(spec, seed=3)))
    room.slots_T.fill_(2)
    assert not torch.equal(logits(model), wanted)
    assert counters["stats"]["unique_graphs"] == len(set(model.dims.kinds))


def requests(spec, folder, count=5):
    """Adapters of the saved model, the directory of each, and one in memory."""
    made = []
    for number in range(1, count + 1):
        peft = wrapped(spec, seed=0, r=1 + number, lora_alpha=4 * number)
        with torch.no_grad():
            for name, parameter in peft.named_parameters():
                if "lora_B" in name:
                    parameter.mul_(number - 3.5)
        if number == 1:
            made.append(LoRARequest("live", number, lora_model=peft))
            continue
        peft.save_pretrained(folder / str(number))
        made.append(LoRARequest(f"adapter {number}", number, str(folder / str(number))))
    return made


def answers(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def logprobs(output):
    answer = output.outputs[0]
    return torch.tensor([each[token].logprob for each, token in zip(answer.logprobs, answer.token_ids)])


def assert_as_alone(outputs, batch, loras, alone, bound):
    for lora, output in zip(batch, outputs):
        wanted = alone[loras.index(lora)]
        assert answers([output]) == answers([wanted]) and output.lora_request is lora
        torch.testing.assert_close(logprobs(output), logprobs(wanted), atol=bound, rtol=0)


@pytest.mark.parametrize("spec", MIXED)
def test_five_adapters_and_none_in_a_batch_answer_as_each_alone(spec, tmp_path):
    """Beside others, with cached prefixes, preempted: logprobs of each token within 1e-5, those of merged weights within 2e-5."""
    _, folder = saved(spec)
    loras = [None, *requests(spec, tmp_path)]
    drawn = {"temperature": 8, "seed": 3} if spec == "gemma4_moe" else {"temperature": 0}  # the tiny one repeats a sure token
    params = SamplingParams(max_tokens=16, ignore_eos=True, presence_penalty=0.5, repetition_penalty=1.1, logprobs=1, **drawn)
    ask = lambda llm, loras: llm.generate([TOKENS] * len(loras), params, use_tqdm=False, lora_request=loras)
    llm, merged = (LLM(folder, skip_tokenizer_init=True, **SIZES, **room) for room in (ROOM, {}))
    alone = [ask(llm, [lora])[0] for lora in loras]
    for lora, one in zip(loras, alone):
        if lora is not None:
            merged.load_adapter(lora.source, lora.lora_name)
        wanted = ask(merged, [None])[0]
        assert answers([one]) == answers([wanted])
        torch.testing.assert_close(logprobs(one), logprobs(wanted), atol=2e-5, rtol=0)
        if lora is not None:
            merged.unload_adapter()
    batch = loras * 2 + [loras[3], None]
    for _ in range(2):  # the second time prefixes are cached
        assert_as_alone(ask(llm, batch), batch, loras, alone, 1e-5)
    tight = LLM(folder, skip_tokenizer_init=True, **(SIZES | {"num_gpu_blocks_override": 9}), **ROOM)
    assert_as_alone(ask(tight, batch), batch, loras, alone, BOUND.get(spec, 1e-5))
    assert tight.metrics()["preemptions"] > 0
    assert len({tuple(logprobs(output).tolist()) for output in alone}) == 6
    assert (torch.stack([logprobs(output) for output in alone]).abs().amax(1) > 1e-3).all()
    assert llm.llm_engine.list_loras() == {1, 2, 3, 4, 5}
    assert "adapters of requests:" in llm.report()


def test_a_cached_prefix_is_of_its_adapter(tmp_path):
    _, folder = saved("llama")
    lora, other, _ = requests("llama", tmp_path, 3)
    llm = LLM(folder, skip_tokenizer_init=True, **SIZES, **ROOM)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)

    def hits(lora):
        before = llm.metrics()["prefix_cache_hit_tokens"]
        llm.generate([TOKENS], params, use_tqdm=False, lora_request=lora)
        return llm.metrics()["prefix_cache_hit_tokens"] - before

    assert [hits(each) for each in (None, lora, other, None, lora, other)] == [0, 0, 0, 16, 16, 16]
    again = LoRARequest("live", 1, lora_model=lora.lora_model, load_inplace=True)
    assert [hits(again), hits(lora)] == [0, 16]


def test_a_changed_adapter_is_read_again_where_the_request_says_so(tmp_path):
    _, folder = saved("llama")
    (lora,) = requests("llama", tmp_path, 1)
    llm = LLM(folder, skip_tokenizer_init=True, **SIZES, **ROOM)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    ask = lambda request: answers(llm.generate([TOKENS], params, use_tqdm=False, lora_request=request))[0]
    plain, first = ask(None), ask(lora)
    with torch.no_grad():
        for name, parameter in lora.lora_model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    assert first != plain and ask(lora) == first
    assert ask(LoRARequest("live", 1, lora_model=lora.lora_model, load_inplace=True)) == plain
    assert llm.llm_engine.remove_lora(1) and not llm.llm_engine.remove_lora(1)


def test_an_async_engine_takes_adapters(tmp_path):
    _, folder = saved("llama")
    loras = [None, *requests("llama", tmp_path, 3)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    llm = LLM(folder, skip_tokenizer_init=True, **SIZES, **ROOM)
    wanted = [answers(llm.generate([TOKENS], params, use_tqdm=False, lora_request=lora))[0] for lora in loras]

    async def one(engine, number, lora):
        async for output in engine.generate({"prompt_token_ids": TOKENS}, params, str(number), lora_request=lora):
            final = output
        return final.outputs[0].token_ids

    async def all_of_them():
        engine = AsyncEngine(folder, skip_tokenizer_init=True, **SIZES, **ROOM)
        assert await engine.add_lora(loras[1]) and not await engine.add_lora(loras[1])
        found = await asyncio.gather(*(one(engine, number, lora) for number, lora in enumerate(loras)))
        assert await engine.list_loras() == {1, 2, 3}
        engine.close()
        return found

    assert asyncio.run(all_of_them()) == wanted


def test_what_cannot_be_attached_is_refused_by_name(tmp_path):
    _, folder = saved("llama")
    plain = LLM(folder, skip_tokenizer_init=True, **SIZES)
    (lora,) = requests("llama", tmp_path, 1)
    with pytest.raises(ValueError, match="needs LLM\\(enable_lora=True\\)"):
        plain.generate([TOKENS], use_tqdm=False, lora_request=lora)
    llm = LLM(folder, skip_tokenizer_init=True, **SIZES, enable_lora=True, max_lora_rank=2, lora_target_modules=["q_proj", "down_proj"])
    ask = lambda **changes: llm.generate([TOKENS], use_tqdm=False, lora_request=LoRARequest("a", 1, lora_model=wrapped("llama", **changes)))
    with pytest.raises(AdapterError, match=r"has rank 3 at .*, and max_lora_rank is 2"):
        ask(target_modules=["q_proj"])
    with pytest.raises(AdapterError, match=r"changes self_attn.o_proj, which has no room"):
        ask(r=2, target_modules=["o_proj"])
    with pytest.raises(AdapterError, match=r"changes lm_head, which has no room"):
        ask(r=2, target_modules=["lm_head"])
    assert llm.llm_engine.list_loras() == set() and not llm.llm_engine.unfinished
    ask(r=2, target_modules=["q_proj"])
    with pytest.raises(AdapterError, match=r"lora_int_id=1 is adapter 'a' already"):
        llm.generate([TOKENS], use_tqdm=False, lora_request=lora)
    for wrong in ({"lora_int_id": 0, "lora_path": "x"}, {"lora_int_id": 1}, {"lora_int_id": 1, "lora_path": "x", "lora_model": 1}):
        with pytest.raises(ValueError, match=r"lora_int_id is 0|has . of lora_path"):
            LoRARequest("wrong", **wrong)
    with pytest.raises(ValueError, match="lora_requests were given for 2 prompts"):
        llm.generate([TOKENS, TOKENS], use_tqdm=False, lora_request=[None])
    second = LoRARequest("b", 2, lora_model=wrapped("llama", r=2, target_modules=["q_proj"]))
    stream = llm.stream([TOKENS], SamplingParams(max_tokens=8), second)
    next(stream)
    with pytest.raises(AdapterError, match="adapter 2 is that of 1 answers that have not ended"):
        llm.llm_engine.remove_lora(2)
    stream.close()
    assert llm.llm_engine.remove_lora(2)


def test_merged_and_attached_together_and_weights_that_change_below(tmp_path):
    merged, attached = wrapped("llama", target_modules=["q_proj"]), wrapped("llama", r=5, seed=0, target_modules=["q_proj", "o_proj"])
    _, folder = saved("llama")
    llm = LLM(folder, skip_tokenizer_init=True, **SIZES, **ROOM)
    model = llm.llm_engine.model
    assert isinstance(model, Model)
    pristine = model.read(model.layers[0], "qkv").clone()
    llm.load_adapter(merged)
    room = llm.llm_engine.adapters.attached
    room.place(1, room.read(attached))
    room.slots_T.fill_(1)
    got = logits(model)
    attached.add_adapter("other", merged.peft_config["default"])
    for (name, a), (_, b) in zip(
        [(n, p) for n, p in attached.named_parameters() if ".other." in n], [(n, p) for n, p in merged.named_parameters() if "lora_" in n]
    ):
        assert a.shape == b.shape, name
        a.data.copy_(b)
    attached.base_model.set_adapter(["default", "other"])
    wanted = expected(attached, TOKENS)
    assert (got - wanted).abs().max() / wanted.abs().max() < 1e-5
    llm.unload_adapter()
    assert torch.equal(model.read(model.layers[0], "qkv"), pristine)
    assert llm.load_weights(folder).counts["qkv"] == 3 * len(model.layers)


def test_a_trainers_adapter_is_loaded_as_it_is_saved_as_peft_does_and_loaded_again(tmp_path):
    peft = wrapped("llama")
    sizes = {name: value for name, value in SIZES.items() if name not in ("dtype", "device")}
    llm = LLM.from_model(peft, **sizes, **ROOM)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    ask = lambda lora: answers(llm.generate([TOKENS], params, use_tqdm=False, lora_request=lora))[0]
    plain, live = ask(None), llm.load_lora(tmp_path, load_tensors=True)
    first = ask(live)
    llm.save_lora(tmp_path)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                parameter.mul_(-4)
    changed = llm.load_lora(tmp_path, load_tensors=True)
    assert first != plain and ask(live) == first and ask(changed) not in (first, plain)
    saved_one = llm.load_lora(str(tmp_path))
    assert ask(saved_one) == first and [each.lora_int_id for each in (live, changed, saved_one)] == [1, 2, 3]
    bare = LLM(saved("llama")[1], skip_tokenizer_init=True, **SIZES, **ROOM)
    for call in (lambda: bare.save_lora(tmp_path), lambda: bare.load_lora(tmp_path, load_tensors=True)):
        with pytest.raises(AdapterError, match="needs a live PeftModel"):
            call()
    with pytest.raises(AdapterError, match="cannot be read"):
        bare.load_lora(tmp_path / "nothing")


def test_adapters_used_longest_ago_are_forgotten_but_for_pinned_ones(tmp_path):
    _, folder = saved("llama")
    loras = requests("llama", tmp_path, 5)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    everything = LLM(folder, skip_tokenizer_init=True, **SIZES, **ROOM)
    wanted = [answers(everything.generate([TOKENS], params, use_tqdm=False, lora_request=lora))[0] for lora in loras]
    llm = LLM(folder, skip_tokenizer_init=True, **SIZES, **ROOM, max_cpu_loras=2)
    engine = llm.llm_engine
    ask = lambda number: answers(llm.generate([TOKENS], params, use_tqdm=False, lora_request=loras[number - 1]))[0]
    for number, kept in ((1, {1}), (2, {1, 2}), (1, {1, 2}), (3, {1, 3}), (2, {2, 3})):
        assert ask(number) == wanted[number - 1] and engine.list_loras() == kept
    assert engine.pin_lora(2)
    for number, kept in ((4, {2, 4}), (5, {2, 5}), (1, {1, 2})):
        assert ask(number) == wanted[number - 1] and engine.list_loras() == kept
        _, fresh = engine.scheduler.adapters.take(2)
        engine.scheduler.adapters.give_back(2)
        assert not fresh
    with pytest.raises(AdapterError, match=r"adapter 1 cannot be pinned beside \[2\]: max_loras=2"):
        engine.pin_lora(1)
    with pytest.raises(AdapterError, match=r"no adapter 9 to pin; there are \[1, 2\]"):
        engine.pin_lora(9)
    with pytest.raises(AdapterError, match="max_cpu_loras=2 adapters are kept, and each is pinned or has answers"):
        llm.generate([TOKENS] * 3, params, use_tqdm=False, lora_request=[loras[0], loras[2], loras[3]])
    assert engine.list_loras() == {1, 2}
    assert engine.remove_lora(2) and not engine.scheduler.adapters.pinned and not engine.unfinished
    assert ask(4) == wanted[3]
    with pytest.raises(ValueError, match="max_cpu_loras=1 is out of range: it must be at least 2"):
        LLM(folder, skip_tokenizer_init=True, **SIZES, **ROOM, max_cpu_loras=1)
