"""Files as people have them: fields that writers leave, ropes that stretch, names without a prefix, packed weights, stale indices."""

from __future__ import annotations

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from flexgen.contract.configs import normalise
from flexgen.contract.ignored import NO_EFFECT, OUTSIDE, STATED
from flexgen.contract.quantised import WAYS_OUT
from flexgen.errors import ConfigError
from flexgen.runtime.llm import LLM
from flexgen.runtime.loading.checkpoint import CheckpointError
from flexgen.runtime.loading.model import Model
from flexgen.runtime.loading.package import choose, load_package
from flexgen.runtime.requests.params import SamplingParams
from tests.runtime.loading.published import PUBLISHED
from tests.runtime.loading.test_real_models import oracle
from tests.tiny import dump, reference, saved, tiny_config

torch.set_num_threads(1)
SIZES = {"device": "cpu", "dtype": "float32", "max_num_seqs": 2, "num_gpu_blocks_override": 40, "skip_tokenizer_init": True}
INDEX = "model.safetensors.index.json"


def raw_of(release):
    spec, text, outer = PUBLISHED[release]
    text = {key: value for key, value in (tiny_config(spec) | text).items() if value is not ...}
    return spec, text if outer is None else {"model_type": text["model_type"].removesuffix("_text"), "text_config": text, **outer}


@pytest.mark.parametrize("release", PUBLISHED)
def test_the_fields_of_published_files_are_all_accounted_for(release):
    spec, raw = raw_of(release)
    folder = choose(raw)
    assert folder.name == spec
    walker = load_package(folder).walker
    walker.Dims.from_config(normalise(raw, walker.TEXT_CONFIG))


def test_each_field_of_the_tables_has_a_reason_and_does_nothing():
    assert all(NO_EFFECT.values()) and all(OUTSIDE.values()) and all(values and why for values, why in STATED.values())
    walker = load_package(choose(tiny_config("llama"))).walker
    plain = walker.Dims.from_config(normalise(tiny_config("llama"), None))
    for field in NO_EFFECT:
        if field not in ("model_type", "max_position_embeddings"):
            assert walker.Dims.from_config(normalise({**tiny_config("llama"), field: 3}, None)) == plain
    for field, (values, _) in STATED.items():
        for value in values:
            assert walker.Dims.from_config(normalise({**tiny_config("llama"), field: value}, None)) == plain
        for other in (True, 2, [1], "x"):
            with pytest.raises(ConfigError, match=field):
                walker.Dims.from_config(normalise({**tiny_config("llama"), field: other}, None))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "linear", "factor": 4.0},
    ],
)
@pytest.mark.parametrize("old", [False, True])
def test_a_scaled_rope_reaches_as_far_as_its_factor(rope, old, tmp_path):
    model = reference(tiny_config("qwen3", max_position_embeddings=64, rope_parameters={"rope_theta": 10000.0, **rope}))
    model.save_pretrained(tmp_path)
    if old:
        raw = json.loads((tmp_path / "config.json").read_text())
        raw.update(rope_parameters=None, rope_theta=10000.0, rope_scaling={"type": rope["rope_type"], **rope})
        (tmp_path / "config.json").write_text(json.dumps(raw))
    prompt = [(7 * i) % 211 for i in range(150)]
    llm = LLM(tmp_path, max_model_len=256, **SIZES)
    (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
    assert output.outputs[0].token_ids == oracle(model, prompt, 12)
    assert LLM(tmp_path, **SIZES).llm_engine.options.max_model_len == 64
    with pytest.raises(ValueError, match=r"max_model_len=257 .*max_position_embeddings=64, which its rope stretches to 256"):
        LLM(tmp_path, max_model_len=257, **SIZES)


def test_an_unscaled_rope_reaches_no_further():
    with pytest.raises(ValueError, match=r"max_model_len=257 is more than the model's max_position_embeddings=256$"):
        LLM(saved("llama")[1], max_model_len=257, **SIZES)


# ---------------------------------------------------------------- tensors and their files


def storages(folder):
    model = Model.load(folder, device="cpu", dtype="float32")
    return model, {f"{weight.role}.{index}": getattr(layer, weight.role) for layer, weight, index in model.storages()}


@pytest.mark.parametrize("spec", ["llama", "qwen3", "gemma4_e"])
def test_names_without_the_models_prefix(spec, tmp_path):
    folder = shutil.copytree(saved(spec)[1], tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    extra = {"vision_tower.x": torch.ones(1)} if spec == "gemma4_e" else {}
    save_file({**{name.removeprefix("model."): t for name, t in tensors.items()}, **extra}, folder / "model.safetensors")
    (model, ours), (_, theirs) = storages(folder), storages(saved(spec)[1])
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs) and sum(model.report.skipped.values()) == len(extra)


def test_a_stale_index_beside_a_whole_file(tmp_path, caplog):
    folder = shutil.copytree(saved("llama")[1], tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    names = {name: f"model-0000{1 + n % 2}-of-00002.safetensors" for n, name in enumerate(tensors)}
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    with caplog.at_level(logging.WARNING):
        _, ours = storages(folder)
    assert "is stale" in caplog.text and all(torch.equal(ours[n], t) for n, t in storages(saved("llama")[1])[1].items())
    save_file({n: t for n, t in tensors.items() if "00001" in names[n]}, folder / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks model-00002.*model\.safetensors is there too.*remove model\.safetensors\.index"):
        storages(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-00002-of-00002\.safetensors, which model\.safetensors\.index\.json lists$"):
        storages(folder)


@pytest.mark.parametrize("method", [*WAYS_OUT, "brand-new"])
@pytest.mark.parametrize("spec, nested", [("llama", False), ("gemma4_dense", True), ("gpt_oss", False)])
def test_quantised_checkpoints_name_the_method_and_its_way_out(spec, nested, method, tmp_path):
    if spec == "gpt_oss" and method in ("mxfp4", "brand-new"):
        return
    config, packed = tiny_config(spec), {"quantization_config": {"quant_method": method, "bits": 4}}
    raw = {"model_type": "gemma4", "text_config": config, **packed} if nested else {**config, **packed}
    with pytest.raises(ConfigError, match=f"quantised by '{method}'") as caught:
        Model.load(dump(raw, tmp_path / "m"), device="cpu", load_format="dummy")
    assert WAYS_OUT.get(method, "write it in 16 or 32 bits first") in str(caught.value)


def test_other_ways_to_say_quantised(tmp_path):
    for field, message in [
        ({"quantization": {"group_size": 64, "bits": 4}}, "'mlx'"),
        ({"quantization_config": {"load_in_4bit": True}}, "a method that config.json does not name"),
        ({"quantization_config": "awq"}, "quantised by 'awq'"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "'compressed-tensors'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            Model.load(dump({**tiny_config("llama"), **field}, tmp_path / "m"), device="cpu", load_format="dummy")
    plain = {**tiny_config("llama"), "quantization_config": {"quant_method": "awq"}}  # weights made plain, the field left
    Model.load(dump(plain, tmp_path / "m"), device="cpu", load_format="dummy", ignore_config=["quantization_config"])
