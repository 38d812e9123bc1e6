"""What calls of `LLM` take beside prompts and parameters: defaults, priorities, limits; what comes back beside answers; its end."""

from __future__ import annotations

import json

import pytest
from tiny import saved

from flexgen import LLM, SamplingParams
from flexgen.errors import ConfigError, FlexgenError
from tests.runtime.toy import Toy

BARE = {"skip_tokenizer_init": True, "max_model_len": 32, "num_gpu_blocks_override": 12, "max_num_seqs": 1}
THREE = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


def test_lower_priorities_run_first_and_equal_ones_in_order():
    llm = LLM(Toy(), scheduling_policy="priority", **BARE)
    outputs = llm.generate([[1], [2], [3], [4]], THREE, use_tqdm=False, priority=[5, 0, 5, -1])
    began = [output.metrics.scheduled_ts for output in outputs]
    assert sorted(range(4), key=began.__getitem__) == [3, 1, 0, 2]
    alone = LLM(Toy(), **BARE).generate([[1], [2], [3], [4]], THREE, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in alone]


def test_a_preempted_request_is_the_least_urgent_one():
    toy = Toy()
    sizes = {**BARE, "max_num_seqs": 3, "num_gpu_blocks_override": 3, "block_size": 4, "max_model_len": 13}
    llm = LLM(toy, scheduling_policy="priority", **sizes)
    long = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    outputs = llm.generate([[1], [2], [3]], long, use_tqdm=False, priority=[2, 1, 0])
    assert llm.metrics()["preemptions"] > 0
    ended = [output.metrics.last_token_ts for output in outputs]
    assert ended == sorted(ended, reverse=True)
    roomy = LLM(Toy(), **{**sizes, "num_gpu_blocks_override": 30})
    assert [o.outputs[0].token_ids for o in outputs] == [
        o.outputs[0].token_ids for o in roomy.generate([[1], [2], [3]], long, use_tqdm=False)
    ]


@pytest.mark.parametrize("priority", [[1], [1, 2, 3], ["a", "b"], [True, False], [0.5, 1]])
def test_priorities_are_ints_one_for_each_prompt(priority):
    llm = LLM(Toy(), scheduling_policy="priority", **BARE)
    with pytest.raises(ValueError, match="must be 2 ints, one for each prompt"):
        llm.generate([[1], [2]], THREE, priority=priority)
    with pytest.raises(ValueError, match="has an effect with LLM"):
        LLM(Toy(), **BARE).generate([[1], [2]], THREE, priority=[1, 2])
    assert llm.metrics()["waiting_requests"] == 0


def test_metrics_tell_when_what_happened():
    outputs = LLM(Toy(), **BARE).generate([[1], [2]], THREE, use_tqdm=False)
    for output in outputs:
        seen = output.metrics
        assert seen.queued_ts <= seen.scheduled_ts <= seen.first_token_ts < seen.last_token_ts
        assert seen.first_token_latency == seen.first_token_ts - seen.queued_ts and seen.num_generation_tokens == 3
        assert seen.arrival_time > 1.7e9
    assert outputs[0].metrics.last_token_ts <= outputs[1].metrics.first_token_ts  # one slot


def test_more_logprobs_than_allowed_are_refused():
    llm = LLM(Toy(), max_logprobs=2, **BARE)
    for wrong in (3, -1):
        with pytest.raises(ValueError, match=f"logprobs={wrong} is more than max_logprobs=2"):
            llm.generate([[1]], SamplingParams(logprobs=wrong))
    assert llm.generate([[1]], SamplingParams(logprobs=2), use_tqdm=False)
    LLM(Toy(), max_logprobs=-1, **BARE).generate([[1]], SamplingParams(logprobs=61), use_tqdm=False)


def test_a_closed_engine_is_gone_and_says_so():
    with LLM(Toy(), **BARE) as llm:
        llm.generate([[1]], THREE, use_tqdm=False)
    for call in (lambda: llm.generate([[1]], THREE), llm.metrics, llm.reset_prefix_cache):
        with pytest.raises(FlexgenError, match="this LLM is closed"):
            call()
    llm.close()


@pytest.fixture
def directory(tmp_path):
    _, folder = saved("llama")
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    return tmp_path


def write(directory, **fields):
    (directory / "generation_config.json").write_text(json.dumps(fields))


def test_calls_without_parameters_draw_as_the_model_says(directory):
    write(directory, temperature=0.3, top_p=0.9, max_new_tokens=5, do_sample=True, eos_token_id=2)
    load = {"skip_tokenizer_init": True, "max_model_len": 64, "dtype": "float32"}
    llm = LLM(directory, **load)
    defaults = llm.get_default_sampling_params()
    assert (defaults.temperature, defaults.top_p, defaults.max_tokens, defaults.top_k) == (0.3, 0.9, 5, 0)
    assert len(llm.generate([[5, 6]], use_tqdm=False)[0].outputs[0].token_ids) <= 5
    changed = LLM(directory, override_generation_config={"temperature": 0.0, "max_new_tokens": 2}, **load)
    assert changed.get_default_sampling_params().temperature == 0.0
    assert LLM(directory, generation_config="vllm", **load).get_default_sampling_params() == SamplingParams()
    with pytest.raises(ValueError, match="override_generation_config has temprature, and takes"):
        LLM(directory, override_generation_config={"temprature": 1}, **load)
    write(directory, temperature=-1)
    with pytest.raises(ConfigError, match=r"generation_config.json sets \{'temperature': -1\}, which cannot be served: temperature=-1"):
        LLM(directory, **load)
    with pytest.raises(ConfigError, match=r"must be .*or a directory with generation_config"):
        LLM(directory, generation_config=str(directory / "nowhere"), **load)


def test_fields_in_place_of_the_configs(directory):
    load = {"skip_tokenizer_init": True, "max_model_len": 16, "dtype": "half"}
    llm = LLM(directory, hf_overrides={"rms_norm_eps": 0.5}, **load)
    assert llm.model.dims.eps == 0.5 and str(llm.model.dtype) == "torch.float16"
    with pytest.raises(ConfigError, match="not_a_field"):
        LLM(directory, hf_overrides={"not_a_field": 1}, **load)
    with pytest.raises(ConfigError, match="hf_overrides is 3, and must be a dict of fields"):
        LLM(directory, hf_overrides=3, **load)


def test_an_adapters_directory_says_what_it_is(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "me/base"}))
    with pytest.raises(ConfigError, match="is an adapter, of 'me/base': load that model, and the adapter onto it"):
        LLM(tmp_path)
