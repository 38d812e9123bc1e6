"""Files that are broken or mean harm: each ends soon, in an error of ours that is short and names the file."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flexgen.errors import ConfigError, FlexgenError
from flexgen.runtime.llm import LLM
from flexgen.runtime.loading.checkpoint import CheckpointError
from flexgen.runtime.loading.package import PackageError, load_package
from flexgen.runtime.requests.tokens import Tokens
from tests.runtime.small_tokenizer import small_tokenizer
from tests.tiny import saved, tiny_config

torch.set_num_threads(1)
SIZES = {"device": "cpu", "dtype": "float32", "max_num_seqs": 2, "num_gpu_blocks_override": 40, "skip_tokenizer_init": True}
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(saved("llama")[1], tmp_path / "m")


def refused(folder, kind, match, **options):
    started = time.monotonic()
    with pytest.raises(kind, match=match) as caught:
        LLM(folder, **{**SIZES, **options})
    assert time.monotonic() - started < 10 and len(str(caught.value)) < 2000
    return str(caught.value)


# ---------------------------------------------------------------- indices

OUT = "must be a name in its own folder"


@pytest.mark.parametrize("where", ["../outside.safetensors", "ABSOLUTE", "sub/x.safetensors", "..", ".", "", "a\\b.safetensors", "a\0b"])
def test_an_index_stays_inside_the_models_folder(where, folder):
    shutil.copy(folder / "model.safetensors", folder.parent / "outside.safetensors")
    (folder / "sub").mkdir()
    shutil.copy(folder / "model.safetensors", folder / "sub" / "x.safetensors")
    name = str(folder.parent / "outside.safetensors") if where == "ABSOLUTE" else where
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    refused(folder, CheckpointError, OUT)


@pytest.mark.parametrize("value", [5, None, "x" * 5000, [], {}, True, 1.5, ["a"]])
def test_an_index_value_that_is_no_file_name(value, folder):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": value}}))
    refused(folder, CheckpointError, OUT)


NO_INDEX = ("", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": 3}', "[" * 9000, '{"a":' * 900)


@pytest.mark.parametrize("text", NO_INDEX)
def test_an_index_that_is_none(text, folder):
    (folder / INDEX).write_text(text)
    refused(folder, CheckpointError, INDEX)


def test_pipes_and_folders_in_place_of_files(folder):
    os.mkfifo(folder / "pipe.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "pipe.safetensors"}}))
    refused(folder, CheckpointError, "pipe.safetensors is no plain file")
    (folder / INDEX).unlink()
    os.mkfifo(folder / INDEX)
    refused(folder, CheckpointError, "index.json is no plain file")
    (folder / INDEX).unlink()
    (folder / INDEX).mkdir()
    refused(folder, CheckpointError, "index.json is no plain file")
    (folder / INDEX).rmdir()
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    refused(folder, CheckpointError, "model.safetensors is no plain file")
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    refused(folder, ConfigError, "config.json is no plain file")


def test_many_missing_shards_are_not_all_listed(folder):
    (folder / INDEX).write_text(json.dumps({"weight_map": {str(n): f"{n}-{'x' * 200}" for n in range(5000)}}))
    (folder / "model.safetensors").unlink()
    refused(folder, CheckpointError, "and 4988 more")


# ---------------------------------------------------------------- config.json


@pytest.mark.parametrize("depth", [100, 900, 5000, 100_000])
@pytest.mark.parametrize("braces", [('{"a":', "}"), ("[", "]")])
def test_a_config_nested_deeply(depth, braces, folder):
    text = json.dumps(tiny_config("llama"))[:-1] + ', "x": ' + braces[0] * depth + "1" + braces[1] * depth + "}"
    (folder / "config.json").write_text(text)
    refused(folder, ConfigError, "nested too deeply")


@pytest.mark.parametrize("count", [30_000, 2_500_000])
def test_a_config_of_very_many_fields(count, folder):
    fields = ",".join(f'"f{n}":{n}' for n in range(count))
    (folder / "config.json").write_text(json.dumps(tiny_config("llama"))[:-1] + "," + fields + "}")
    refused(folder, ConfigError, "f0, f1|is the most that one may have")


def test_long_names_and_values_are_cut(folder):
    (folder / "config.json").write_text(json.dumps({**tiny_config("llama"), "x" * 50_000: 1}))
    refused(folder, ConfigError, "fields that this spec does not read")
    for field in ("hidden_size", "rms_norm_eps", "hidden_act", "model_type", "torch_dtype", "tie_word_embeddings", "rope_parameters"):
        for value in ("y" * 50_000, ["y" * 50_000], 10**4000):
            (folder / "config.json").write_text(json.dumps({**tiny_config("llama"), field: value}))
            refused(folder, (ConfigError, ValueError), field.removeprefix("torch_"), dtype="auto")


@pytest.mark.parametrize("spec", ["x" * 5000, Path("x" * 5000)])
def test_a_specs_name_that_is_long_is_cut(spec, folder):
    refused(folder, ConfigError, r"no generated package .*x{60}.*…: run", spec=spec)


@pytest.mark.parametrize("name", ["generated", "tokenizer"])
def test_a_path_that_is_too_long_is_no_path(name, folder):
    for path in ("x" * 5000, Path("a/" * 3000)):
        refused(folder, ValueError, f"{name} is .*…, and cannot be looked for: File name too long", **{name: path})
        refused(path, ValueError, "model is .*…, and cannot be looked for: File name too long")


def test_a_device_that_is_long_is_cut(folder):
    refused(folder, ValueError, "device is 'x{78}…, which torch cannot use here: Expected one of cpu", device="x" * 5000)


@pytest.mark.parametrize("factor", [1e308, 10**308])
@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_a_rope_that_stretches_without_end(kind, factor, folder):
    rope = {"rope_type": kind, "factor": factor, "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(tiny_config("qwen3", rope_parameters=rope)))
    refused(folder, ValueError, "which its rope stretches to 16777216", max_model_len=2**24 + 1, load_format="dummy")


@pytest.mark.parametrize("size", [10**12, 10**9, 10**18, 2**62])
@pytest.mark.parametrize("field", ["vocab_size", "max_position_embeddings", "hidden_size", "intermediate_size", "head_dim"])
def test_sizes_that_no_memory_holds(field, size, folder):
    (folder / "config.json").write_text(json.dumps({**tiny_config("llama"), field: size}))
    for load_format in ("auto", "dummy"):
        refused(folder, (ConfigError, CheckpointError), r"bytes by config\.json|max_position_embeddings", load_format=load_format)


def test_a_text_that_no_memory_has_positions_for(folder):
    for length in (10**12, 10**9):
        refused(folder, ValueError, "max_model_len", max_model_len=length)


# ---------------------------------------------------------------- weights, tokenizers, packages


def test_a_tokenizer_of_very_many_entries(tmp_path):
    small_tokenizer().save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    raw["model"]["vocab"].update({f"token{n}": 400 + n for n in range(2_500_000)})
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    started = time.monotonic()
    with pytest.raises(FlexgenError, match=r"tokenizer\.json has \d+ bytes"):
        Tokens.load(tmp_path, tmp_path, {}, 211)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("text", ["[" * 9000, '{"a":' * 900 + "1" + "}" * 900])
def test_a_generation_config_that_is_none(text, folder):
    (folder / "generation_config.json").write_text(text)
    refused(folder, ConfigError, "generation_config.json")


@pytest.mark.parametrize("keep", [0, 4, 8, 100])
def test_a_header_that_lies(keep, folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes((2**62).to_bytes(8, "little")[:keep] + data[8:keep])
    refused(folder, CheckpointError, "truncated or damaged")


def test_names_that_are_long_are_cut(folder):
    save_file({f"model.layers.0.{'x' * 20_000}{n}": torch.ones(1) for n in range(30)}, folder / "model.safetensors")
    refused(folder, CheckpointError, "lacks")


ODD = ({"files": []}, {"files": {}}, {"model_types": 3}, {"require": []}, {"text_config": 3}, {"defaults": "x"})


@pytest.mark.parametrize("change", ODD)
def test_a_manifest_of_other_kinds(change, tmp_path):
    from flexgen.assets import root

    folder = shutil.copytree(root("generated") / "llama", tmp_path / "llama", ignore=shutil.ignore_patterns("__pycache__"))
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, **change}))
    with pytest.raises(PackageError, match=r"manifest\.json is no manifest"):
        load_package(folder)


def test_an_edited_package_is_not_run_unless_asked(tmp_path, folder):
    from flexgen.assets import root

    package = shutil.copytree(root("generated") / "llama", tmp_path / "llama", ignore=shutil.ignore_patterns("__pycache__"))
    with (package / "walker.py").open("a") as file:
        file.write(f"\nopen({str(tmp_path / 'ran')!r}, 'w')\n")
    refused(folder, PackageError, "edited by hand", generated=package)
    assert not (tmp_path / "ran").exists()
    with pytest.warns(UserWarning, match="edited by hand"):
        LLM(folder, **SIZES, generated=package, allow_edited=True)
    assert (tmp_path / "ran").exists()
