"""What must never be wrong without a word: each case is refused by name, or does what transformers does."""

from __future__ import annotations

import copy
import json
import shutil

import numpy as np
import pytest
import torch

from flexgen.contract.configs import normalise
from flexgen.errors import ConfigError, FlexgenError
from flexgen.runtime.llm import LLM
from flexgen.runtime.requests.params import SamplingParams, StructuredOutputsParams
from flexgen.runtime.requests.rules import bad_word_ids
from flexgen.runtime.requests.tokens import Tokens
from tests.runtime.loading.test_real_models import oracle as greedy_of
from tests.runtime.small_tokenizer import small_tokenizer
from tests.runtime.test_engine import engine, run
from tests.tiny import reference, saved, tiny_config

torch.set_num_threads(1)
SIZES = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "max_num_seqs": 2, "num_gpu_blocks_override": 20}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = [3, 14, 15, 92, 65, 35]


def changed(spec, folder, **fields):
    """The spec's saved tiny checkpoint with fields of its config.json changed."""
    shutil.copytree(saved(spec)[1], folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **fields}))
    return folder


# ---------------------------------------------------------------- tokenizers


@pytest.mark.parametrize("spec", ["qwen3", "qwen3_moe", "qwen3_5"])
@pytest.mark.parametrize("files", [(), ("tokenizer_config.json",), ("tokenizer_config.json", "special_tokens_map.json")])
def test_a_checkpoint_without_tokenizer_files_is_refused_by_their_names(spec, files, tmp_path):
    folder = changed(spec, tmp_path / "model")
    for name in files:
        (folder / name).write_text('{"tokenizer_class": "Qwen2Tokenizer"}' if "config" in name else "{}")
    with pytest.raises(FlexgenError, match=r"(?s)none of the files tokenizer\.json, tokenizer\.model.*skip_tokenizer_init"):
        LLM(folder, **SIZES)
    (output,) = LLM(folder, skip_tokenizer_init=True, **SIZES).generate(PROMPT, GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == greedy_of(saved(spec)[0], PROMPT, 8)


def test_half_a_tokenizer_is_refused_too(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(FlexgenError, match="no tokenizer could be read from"):
        Tokens.load(tmp_path, None, {}, 211)
    with pytest.raises(FlexgenError, match="is no directory; nothing is downloaded"):
        Tokens.load("org/model", None, {}, 211)


# ---------------------------------------------------------------- a part of each head that turns


@pytest.mark.parametrize("spec", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("rope", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}])
def test_a_part_that_turns_is_refused_where_the_family_turns_whole_heads(spec, rope, tmp_path):
    table = {"rope_theta": 10000.0, **rope}
    folder = changed(spec, tmp_path / "a", rope_parameters={**table, "partial_rotary_factor": 0.5})
    with pytest.raises(ConfigError, match=r"rope_parameters\.partial_rotary_factor is 0\.5, and this family turns whole heads"):
        LLM(folder, skip_tokenizer_init=True, **SIZES)
    model = reference(tiny_config(spec, rope_parameters=table))
    state = saved(spec)[0].state_dict()
    model.load_state_dict(state)
    wanted = greedy_of(model, PROMPT, 8)
    for fields, ignored in (({**table, "partial_rotary_factor": 1.0}, ()), ({**table, "partial_rotary_factor": 0.5}, None)):
        folder = changed(spec, tmp_path / str(ignored), rope_parameters=fields)
        ignore = ("rope_parameters.partial_rotary_factor",) if ignored is None else ()
        llm = LLM(folder, skip_tokenizer_init=True, ignore_config=ignore, **SIZES)
        assert llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == wanted


@pytest.mark.parametrize("spec", ["gemma4_dense", "gemma4_moe", "gemma4_e"])
def test_gemma_turns_a_part_in_full_layers_alone(spec, tmp_path):
    ropes = copy.deepcopy(tiny_config(spec)["rope_parameters"])
    ropes["sliding_attention"]["partial_rotary_factor"] = 0.5
    with pytest.raises(ConfigError, match=r"rope_parameters\.sliding_attention\.partial_rotary_factor is 0\.5"):
        LLM(changed(spec, tmp_path / "m", rope_parameters=ropes), skip_tokenizer_init=True, **SIZES)


# ---------------------------------------------------------------- heads and eos


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_of_its_own_dtype_follows_weights_that_change(tied, tmp_path):
    config = tiny_config("qwen3", tie_word_embeddings=tied)
    model = reference(config)
    model.save_pretrained(tmp_path)
    llm = LLM(tmp_path, skip_tokenizer_init=True, head_dtype="float32", **{**SIZES, "dtype": "bfloat16"})
    ours = llm.llm_engine.model
    moved = torch.randn_like(ours.weights.lm_head, dtype=torch.float32)
    address = ours.weights.lm_head.data_ptr()
    (ours.weights.embed_tokens if tied else ours.weights.lm_head).copy_(moved)
    ours.weight_version += 1
    wanted = moved.bfloat16().float() if tied else moved
    assert torch.equal(ours.weights.lm_head, wanted) and ours.weights.lm_head.data_ptr() == address


def test_the_ids_that_end_a_text_are_those_that_transformers_reads(tmp_path):
    from transformers import GenerationConfig

    text = tiny_config("gemma4_dense")
    for outer, inner in (([1, 4], 1), (None, [7]), (3, None), ([1, 4], [9]), (5, 6)):
        raw = {"model_type": "gemma4", "eos_token_id": outer, "text_config": {**text, "eos_token_id": inner}}
        theirs = GenerationConfig.from_model_config(copy.deepcopy(raw)).eos_token_id
        tokens = Tokens(None, normalise(raw, "text_config"), {}, 211)
        assert list(tokens.eos_ids) == (theirs if isinstance(theirs, list) else [theirs])


@pytest.mark.parametrize(
    "outer, message",
    [
        ({"rope_theta": 5.0}, r"outside\.rope_theta"),
        ({"hidden_size": 99}, r"outside\.hidden_size"),
        ({"sliding_window": 99}, r"outside\.sliding_window"),
        ({"strange": {"a": 1}}, r"outside\.strange\.a"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
    ],
)
def test_every_field_beside_the_text_part_is_decided(outer, message, tmp_path):
    spec, text = "gemma4_dense", tiny_config("gemma4_dense")
    harmless = {"image_token_id": 5, "vision_config": {"depth": 3}, "audio_config": {"x": 1}, "eoa_token_index": 4, "unsloth_fixed": True,
                "hidden_size": text["hidden_size"], "vision_soft_tokens_per_image": 280, "initializer_range": 0.1}  # fmt: skip
    inner = {**text, "model_type": "gemma4_text"}
    folder = saved(spec)[1]
    for name, fields in (("good", harmless), ("bad", {**harmless, **outer})):
        shutil.copytree(folder, tmp_path / name)
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "gemma4", "text_config": inner, **fields}))
    (output,) = LLM(tmp_path / "good", skip_tokenizer_init=True, **SIZES).generate(PROMPT, GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == greedy_of(saved(spec)[0], PROMPT, 8)
    with pytest.raises(ConfigError, match=message):
        LLM(tmp_path / "bad", skip_tokenizer_init=True, **SIZES)
    if "outside" in message:
        LLM(tmp_path / "bad", skip_tokenizer_init=True, ignore_config=["outside"], **SIZES)


def test_what_the_spec_reads_cannot_be_ignored(tmp_path):
    for name in ("vocab_size", "rope_parameters", "layer_types", "hidden_act"):
        with pytest.raises(ConfigError, match=f"ignore_config names {name}, which this spec reads"):
            LLM(saved("qwen3")[1], skip_tokenizer_init=True, ignore_config=[name], **SIZES)


# ---------------------------------------------------------------- parameters


def test_lists_of_ids_in_any_form_act(tmp_path):
    free = run(engine(), [[1, 2, 3]], GREEDY)[0].outputs[0].token_ids
    stop = free[3]
    first = free.index(stop)
    forms = [[stop], (stop,), {stop}, (token for token in [stop]), np.array([stop]), torch.tensor([stop]), range(stop, stop + 1)]
    for form in forms:
        params = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=form)
        assert run(engine(), [[1, 2, 3]], params)[0].outputs[0].token_ids == free[: first + 1]
    allowed = (token for token in free)
    assert run(engine(), [[1]], SamplingParams(max_tokens=8, allowed_token_ids=allowed))[0].outputs[0].token_ids
    biased = SamplingParams(temperature=0, max_tokens=2, logit_bias={np.int64(9): np.float32(1000)})
    assert run(engine(), [[1]], biased)[0].outputs[0].token_ids == [9, 9]
    for bad in ("12", b"12", {1: 2}, 3, [1.5], [True], [[1]], torch.tensor(3)):
        with pytest.raises(ValueError, match="stop_token_ids must be"):
            SamplingParams(stop_token_ids=bad)


@pytest.mark.parametrize("field, value", [("logit_bias", {335: 1.0}), ("stop_token_ids", [335]), ("allowed_token_ids", [335])])
def test_padding_ids_are_refused_where_they_would_do_nothing(field, value, tmp_path):
    small_tokenizer().save_pretrained(tmp_path)
    from tests.runtime.toy import Toy

    llm = LLM(Toy(vocab=340), tokenizer=tmp_path, max_model_len=64, max_num_seqs=2, num_gpu_blocks_override=20)
    with pytest.raises(ValueError, match=f"{field} .*padding"):
        llm.generate([[1]], SamplingParams(**{field: value}), use_tqdm=False)


def test_a_bad_word_is_barred_after_a_space_however_many_tokens_that_takes():
    vocabulary = {"Berlin": [1, 2], " Berlin": [3], "x": [7], " x": [8, 7], "yy": [5], " yy": [6, 4]}
    assert bad_word_ids(["Berlin"], vocabulary.__getitem__) == [(1, 2), (3,)]
    assert bad_word_ids(["x"], vocabulary.__getitem__) == [(7,)]
    assert bad_word_ids(["yy"], vocabulary.__getitem__) == [(5,), (6, 4)]


def test_a_pydantic_model_is_a_schema():
    pytest.importorskip("xgrammar")
    from pydantic import BaseModel

    from tests.runtime.requests.test_rules import finish

    class Fox(BaseModel):
        legs: bool

    params = SamplingParams(seed=1, max_tokens=40, structured_outputs=StructuredOutputsParams(json=Fox, disable_any_whitespace=True))
    _, (answer,) = finish([params])
    assert Fox.model_validate_json(answer.text)
    for bad in ({"json": 3}, {"json": dict}, {"regex": 3}, {"grammar": ["x"]}, {"choice": 3}, {"json_object": "yes"}):
        with pytest.raises(ValueError, match=f"structured_outputs.{next(iter(bad))}"):
            StructuredOutputsParams(**bad)
