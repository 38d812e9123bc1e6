"""The surface of LLM: forms of prompts, chat, streams, prompt_logprobs, arguments, and a long mixed run."""

import gc
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flexgen.contract.state import Pages, Slots
from flexgen.errors import ConfigError, FlexgenError
from flexgen.runtime.garbage import NEVER, few_collections
from flexgen.runtime.llm import LLM
from flexgen.runtime.options import EngineOptions
from flexgen.runtime.requests.outputs import RequestOutput
from flexgen.runtime.requests.params import LoRARequest, RequestOutputKind, SamplingParams
from flexgen.runtime.requests.tokens import Tokens
from flexgen.runtime.scheduling.pools import page_groups
from flexgen.runtime.scheduling.sizing import size_pools
from tests.runtime.small_tokenizer import small_tokenizer
from tests.runtime.test_engine import KINDS, assert_all_free, engine, run
from tests.runtime.toy import Toy

torch.set_num_threads(1)
GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture
def talker(tmp_path):
    """An LLM on the toy with a tokenizer on disk, and the toy."""
    small_tokenizer().save_pretrained(tmp_path)
    toy = Toy(vocab=len(small_tokenizer()))
    return LLM(toy, tokenizer=tmp_path, max_model_len=64, max_num_seqs=4, num_gpu_blocks_override=20), toy


def test_prompts_in_every_form(talker):
    llm, toy = talker
    ids = small_tokenizer().encode("the fox")
    forms = ["the fox", ids, {"prompt": "the fox"}, {"prompt_token_ids": ids}, {"prompt": "x", "prompt_token_ids": ids}]
    outputs = llm.generate(forms, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["the fox", None, "the fox", None, "x"]
    assert all(output.prompt_token_ids == ids and output.finished for output in outputs)
    assert all(output.outputs[0].token_ids == toy.greedy(ids, 6) for output in outputs)
    for single in ("the fox", ids, {"prompt": "the fox"}):
        assert len(llm.generate(single, GREEDY, use_tqdm=False)) == 1
    assert [output.request_id for output in outputs] == ["0", "1", "2", "3", "4"]
    with pytest.raises(NotImplementedError, match="multi_modal_data"):
        llm.generate({"prompt": "x", "multi_modal_data": {"image": 1}}, GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match="needs 'prompt'"):
        llm.generate({"text": None}, GREEDY, use_tqdm=False)


def test_one_params_each_in_order(talker):
    llm, _ = talker
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (5, 1, 3)]
    outputs = llm.generate([[5]] * 3, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [5, 1, 3]
    with pytest.raises(ValueError, match="2 sampling_params were given for 3 prompts"):
        llm.generate([[5]] * 3, params[:2], use_tqdm=False)


def test_chat_writes_bos_once_and_passes_the_template_its_arguments(talker):
    llm, _ = talker
    messages = [{"role": "user", "content": "the fox"}]
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids.count(0) == 1 and output.prompt_token_ids[0] == 0
    text = small_tokenizer().decode(output.prompt_token_ids)
    assert text == "<s><user>the fox|<assistant>"
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False, tools=[{"type": "function"}], chat_template_kwargs={"mood": "!"})
    assert small_tokenizer().decode(output.prompt_token_ids) == "<s>[1 tools]<user>the fox|<assistant>!"
    two = [messages, [*messages, {"role": "assistant", "content": "jumps"}]]
    outputs = llm.chat(two, GREEDY, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)
    assert small_tokenizer().decode(outputs[1].prompt_token_ids) == "<s><user>the fox|<assistant>jumps"
    with pytest.raises(ValueError, match="add_generation_prompt=False"):
        llm.chat(messages, GREEDY, continue_final_message=True)


def test_a_stream_grows_to_what_generate_gives(talker):
    llm, _ = talker
    params = SamplingParams(seed=3, max_tokens=12, logprobs=2)
    expected = llm.generate(["the fox", "a dog"], params, use_tqdm=False)
    seen: dict[str, list[RequestOutput]] = {}
    for output in llm.stream(["the fox", "a dog"], params):
        seen.setdefault(output.request_id, []).append(output)
    for outputs, want in zip(seen.values(), expected):
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        assert lengths == sorted(lengths) and len(set(lengths)) > 3
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[-1].outputs == want.outputs
        assert all(want.outputs[0].text.startswith(output.outputs[0].text) for output in outputs)
    final = SamplingParams(seed=3, max_tokens=12, output_kind=RequestOutputKind.FINAL_ONLY)
    assert len(list(llm.stream(["the fox", "a dog"], final))) == 2


def test_a_stream_left_early_frees_everything_and_generate_may_run_inside_one(talker):
    llm, toy = talker
    for output in llm.stream([[5], [6]], SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)):
        (inner,) = llm.generate([[7, 8]], GREEDY, use_tqdm=False)
        assert inner.outputs[0].token_ids == toy.greedy([7, 8], 6)
        if len(output.outputs[0].token_ids) > 4:
            break
    llm.llm_engine.step()
    assert_all_free(llm)


@pytest.mark.parametrize("chunk", [4, 7, 64])
def test_prompt_logprobs_are_those_of_a_whole_forward(chunk):
    toy = Toy(kinds=("full", "sliding"))
    llm = engine(toy, max_num_batched_tokens=chunk, num_gpu_blocks_override=9)
    prompt = [(7 * i) % 61 for i in range(22)]
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2)
    expected = toy.reference_logits(prompt).log_softmax(-1)
    for output in run(llm, [prompt] * 2, params):  # the pool holds one and a half of them: preemption happens
        assert len(output.prompt_logprobs) == 22 and output.prompt_logprobs[0] is None
        for position in range(1, 22):
            entry, row = output.prompt_logprobs[position], expected[position - 1]
            assert entry[prompt[position]].logprob == pytest.approx(float(row[prompt[position]]), abs=1e-4)
            assert entry[prompt[position]].rank == int((row > row[prompt[position]]).sum()) + 1
            assert set(row.topk(2).indices.tolist()) <= set(entry) and len(entry) <= 3
    assert_all_free(llm)


def test_logprobs_hold_the_token_its_rank_and_the_most_likely_ones(talker):
    llm, toy = talker
    ids = [5, 6, 7]
    (output,) = llm.generate([ids], SamplingParams(seed=1, max_tokens=5, logprobs=3, ignore_eos=True), use_tqdm=False)
    answer = output.outputs[0]
    total = 0.0
    for position, token in enumerate(answer.token_ids):
        row = toy.reference_logits(ids + answer.token_ids[:position])[-1][: llm.llm_engine.tokens.vocab].log_softmax(-1)
        entry = answer.logprobs[position]
        assert next(iter(entry)) == token and set(row.topk(3).indices.tolist()) | {token} == set(entry)
        for other, logprob in entry.items():
            assert logprob.logprob == pytest.approx(float(row[other]), abs=1e-4)
            assert logprob.rank == int((row > row[other]).sum()) + 1
            assert logprob.decoded_token == small_tokenizer().decode([other])
        total += entry[token].logprob
    assert answer.cumulative_logprob == pytest.approx(total)


def test_arguments_act_or_raise_by_name():
    toy = Toy()
    bare = {"skip_tokenizer_init": True, "max_model_len": 32, "num_gpu_blocks_override": 8, "max_num_seqs": 2}
    with pytest.raises(TypeError, match="'swap_spac'; did you mean 'swap_space'"):
        LLM(toy, swap_spac=4, **bare)
    with pytest.raises(NotImplementedError, match="tensor_parallel_size=2"):
        LLM(toy, tensor_parallel_size=2, **bare)
    LLM(toy, tensor_parallel_size=1, quantization=None, trust_remote_code=False, model_impl="vllm", **bare)
    with pytest.raises(NotImplementedError, match="enable_sleep_mode"):
        LLM(toy, enable_sleep_mode=True, **bare)
    with pytest.raises(ValueError, match="spec say how to load"):
        LLM(toy, spec="llama", **bare)
    with pytest.raises(ValueError, match=r"max_model_len=999 .* max_position_embeddings=256"):
        LLM(toy, **{**bare, "max_model_len": 999})
    for name, value in [("block_size", 0), ("max_num_seqs", 0), ("gpu_memory_utilization", 1.5), ("seed", "a"),
                        ("num_gpu_blocks_override", 0), ("logprobs_mode", "raw_logits"), ("max_num_batched_tokens", 1),
                        ("gpu_memory_utilization", "0.5"), ("enforce_eager", "no"), ("enable_prefix_caching", "yes"),
                        ("lazy_capture", 1), ("cudagraph_capture_sizes", 4), ("max_model_len", "64")]:
        with pytest.raises(ValueError, match=name):
            LLM(toy, **{**bare, name: value})
    for model in (None, 3, b"checkpoint", ["checkpoint"]):
        with pytest.raises(TypeError, match="model is the directory of a checkpoint, or a loaded Model; got"):
            LLM(model, **bare)
    llm = LLM(toy, **bare)
    with pytest.raises(ValueError, match="lora_request needs LLM"):
        run_lora = LoRARequest("a", 1, "/nowhere")
        llm.generate([[1]], GREEDY, use_tqdm=False, lora_request=run_lora)
    for params, text in [
        ({"stop": "x"}, "stop needs a tokenizer"),
        ({"bad_words": ["x"]}, "bad_words needs a tokenizer"),
        ({"logprobs": 62}, "logprobs=62"),
        ({"stop_token_ids": [61]}, "stop_token_ids holds 61"),
        ({"logit_bias": {61: 1.0}}, "logit_bias holds 61"),
    ]:
        with pytest.raises(ValueError, match=text):
            llm.generate([[1]], SamplingParams(**params), use_tqdm=False)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        llm.generate("text", GREEDY, use_tqdm=False)
    for timeout in (-1, "soon", True):
        with pytest.raises(ValueError, match=f"timeout={timeout!r} is out of range"):
            llm.generate([[1]], GREEDY, use_tqdm=False, timeout=timeout)
    drawn = [SamplingParams(seed=seed, max_tokens=4) for seed in (3, np.int64(3))]
    first, second = (llm.generate([[1]], params, use_tqdm=False)[0].outputs[0].token_ids for params in drawn)
    assert first == second
    assert_all_free(llm)


def test_a_directory_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(Exception, match=f"(?s)no tokenizer could be read from {tmp_path}.*skip_tokenizer_init"):
        Tokens.load(tmp_path, tmp_path, {}, 10)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": ')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(FlexgenError, match=f"(?s)no tokenizer could be read from {tmp_path}.*skip_tokenizer_init"):
        Tokens.load(tmp_path, tmp_path, {}, 10)


@pytest.mark.parametrize("text, message", [("[]", "holds a list, not an object"), ('{"eos_token_id": "x"}', "eos_token_id is 'x'")])
def test_a_generation_config_of_another_kind_is_named(text, message, tmp_path):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        Tokens.load(None, tmp_path, {}, 10)


def test_recurrent_state_counts_before_pages_do(monkeypatch):
    kept = {"full": Pages(2, 64, None), "linear": Slots({"state": ((8, 128, 128), torch.float32)})}
    model = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, state=kept, mixers=[("full",), ("linear",)] * 10)
    groups = page_groups(model.mixers, kept)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * 2**30, 24 * 2**30))
    pages = [size_pools(model, groups, EngineOptions(10**9, max_num_seqs=slots)) for slots in (1, 1001)]
    state, page = 1000 * 10 * 8 * 128 * 128 * 4, groups[0].page_bytes(16, torch.bfloat16)
    assert pages[0][0] - pages[1][0] == pytest.approx(state / page, abs=1)
    with pytest.raises(FlexgenError, match=r"or lower max_num_seqs=9999, whose recurrent state takes 48\.83 GiB"):
        size_pools(model, groups, EngineOptions(10**9, max_num_seqs=9999, max_num_batched_tokens=9999))


def test_memory_decides_the_pages_but_never_more_than_all_slots_use():
    llm = LLM(Toy(), skip_tokenizer_init=True, max_model_len=30, max_num_seqs=3, block_size=4)
    assert llm.metrics()["total_blocks"] == 3 * 8


@pytest.mark.parametrize("kinds, count", zip(KINDS.values(), [300, 2000, 300, 300]), ids=KINDS.keys())
def test_many_mixed_requests_through_thirty_two_slots_end_with_everything_free(kinds, count):
    rng = random.Random(0)
    llm = engine(Toy(kinds=kinds), max_num_seqs=32, num_gpu_blocks_override=90, max_num_batched_tokens=48)
    prompts = [[rng.randrange(4) for _ in range(rng.randint(1, 40))] for _ in range(count)]
    params = [
        SamplingParams(
            max_tokens=rng.randint(1, 16),
            temperature=rng.choice([0, 1]),
            top_p=rng.choice([1.0, 0.8]),
            presence_penalty=rng.choice([0, 0, 0.5]),
            logprobs=rng.choice([None, 0, 2]),
            stop_token_ids=rng.sample(range(61), 3),
            seed=i,
        )
        for i in range(count)
    ]
    outputs = run(llm, prompts, params)
    for output, prompt, each in zip(outputs, prompts, params):
        answer = output.outputs[0]
        assert output.prompt_token_ids == prompt and 1 <= len(answer.token_ids) <= each.max_tokens
        assert answer.finish_reason in ("stop", "length")
        assert answer.logprobs is None or len(answer.logprobs) == len(answer.token_ids)
    assert llm.metrics()["preemptions"] > 0 or "sliding" in kinds[0]
    llm.llm_engine.step()
    assert_all_free(llm)


def test_threads_take_turns(talker):
    llm, toy = talker
    prompts = [[1 + row, 5, 2] for row in range(8)]
    with ThreadPoolExecutor(8) as pool:
        outputs = list(pool.map(lambda ids: llm.generate([ids], GREEDY, use_tqdm=False)[0], prompts * 3))
    assert [output.outputs[0].token_ids for output in outputs] == [toy.greedy(ids, 6) for ids in prompts * 3]
    assert len({output.request_id for output in outputs}) == len(outputs)
    assert_all_free(llm)


@pytest.mark.parametrize("prompt", [None, [None], 5, b"the", [b"the"], {"prompt": 5}])
def test_what_is_no_prompt_is_named(talker, prompt):
    with pytest.raises(TypeError, match="a prompt is text, a list of token ids, or a dict"):
        talker[0].generate(prompt, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("token", [1.5, True, "a"])
def test_what_is_no_token_is_named(talker, token):
    with pytest.raises(ValueError, match=r"prompt token .* must be a whole number"):
        talker[0].generate({"prompt_token_ids": [1, token]}, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("params", [{"temperature": 0}, [GREEDY, None]])
def test_what_is_no_sampling_params_is_named(talker, params):
    with pytest.raises(TypeError, match="sampling_params is one SamplingParams, or a list"):
        talker[0].generate([[1], [2]], params, use_tqdm=False)


def test_parts_of_a_message_are_its_text(talker):
    llm, _ = talker
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"

    def asked(content):
        message = [{"role": "user", "content": content}]
        return llm.chat(message, GREEDY, use_tqdm=False, chat_template=template)[0].prompt_token_ids

    parts = [{"type": "text", "text": "the fox"}, {"type": "text", "text": "the"}]
    assert asked(parts) == asked("the fox\nthe")
    with pytest.raises(ValueError, match="image_url"):
        asked([{"type": "image_url", "image_url": {}}])
    with pytest.raises(ValueError, match=r"a message's content is text, or parts .* got 5"):
        asked(5)
    with pytest.raises(ValueError, match="a message is a dict with a 'role'"):
        llm.chat([{"content": "the"}], GREEDY, use_tqdm=False, chat_template=template)
    with pytest.raises(TypeError, match="messages is a list"):
        llm.chat("the", GREEDY, use_tqdm=False, chat_template=template)


@pytest.mark.parametrize("fails", [False, True])
def test_the_garbage_collector_searches_old_objects_again_after_generate(talker, monkeypatch, fails):
    llm, toy = talker
    before, seen, forward = gc.get_threshold(), [], toy.forward

    def watched(ids_T, step):
        seen.append(gc.get_threshold())
        if fails:
            raise RuntimeError("no memory")
        return forward(ids_T, step)

    monkeypatch.setattr(toy, "forward", watched)
    if fails:
        with pytest.raises(RuntimeError, match="no memory"):
            llm.generate("the fox", GREEDY, use_tqdm=False)
    else:
        llm.generate("the fox", GREEDY, use_tqdm=False)
    assert {(*young, old > 10**9) for *young, old in seen} == {(*before[:2], True)} and gc.get_threshold() == before


def test_garbage_of_a_loop_of_generate_is_collected(talker):
    class Cycle:
        def __init__(self):
            self.own = self

    alive = []
    for _ in range(60):
        alive.append(weakref.ref(Cycle()))
        talker[0].generate("the fox", GREEDY, use_tqdm=False)
        _ = [[] for _ in range(20_000)]
    assert sum(ref() is not None for ref in alive) < 30


def test_threads_inside_generate_leave_the_thresholds_as_they_were():
    before, barrier = gc.get_threshold(), threading.Barrier(3)

    def inside(_):
        with few_collections():
            barrier.wait()
            return gc.get_threshold()[2]

    with ThreadPoolExecutor(3) as pool:
        assert set(pool.map(inside, range(3))) == {NEVER}
    assert gc.get_threshold() == before


def test_parameters_of_many_prompts_are_copied_when_they_are_given():
    llm = engine(max_num_seqs=4)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    growing = llm.stream([[1], [2]], params)
    next(growing)
    params.max_tokens = params.n = 0
    assert {len(output.outputs[0].token_ids) for output in growing if output.finished} == {6}
    with pytest.raises(ValueError, match="n=0 is out of range"):
        run(llm, [[1], [2]], params)


def test_prompts_as_arrays_are_token_ids(talker):
    llm, toy = talker
    forms = [torch.tensor([1, 2, 3]), np.array([1, 2, 3]), (np.int64(n) for n in (1, 2, 3)), range(1, 4), (1, 2, 3)]
    forms += [{"prompt_token_ids": torch.tensor([1, 2, 3])}, {"prompt_token_ids": np.array([1, 2, 3], dtype=np.int32)}]
    for form in forms:
        (output,) = llm.generate(form, GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == toy.greedy([1, 2, 3], 6) and output.prompt_token_ids == [1, 2, 3]
        assert {type(token) for token in output.prompt_token_ids} == {int}
    outputs = llm.generate(torch.tensor([[1, 2], [3, 4]]), GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [[1, 2], [3, 4]]
    for bad in ({"prompt_token_ids": 3}, {"prompt_token_ids": "12"}, {"prompt": 3}, [None], 3, [b"x"], [[[1]]], torch.tensor(3), [1.5]):
        with pytest.raises((TypeError, ValueError), match="prompt"):
            llm.generate(bad, GREEDY, use_tqdm=False)
    assert_all_free(llm)


def test_more_blocks_than_memory_holds_are_refused_with_the_bytes():
    with pytest.raises(ValueError, match=r"num_gpu_blocks_override=1000000000000 takes \d{16,} bytes, and cpu has \d+"):
        engine(num_gpu_blocks_override=10**12)
