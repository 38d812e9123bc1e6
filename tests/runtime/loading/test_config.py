"""config.json: one form from many, strict types, every field accounted for, and the one package that serves it."""

from __future__ import annotations

import copy
import json
import shutil
from typing import Any

import pytest
from tiny import dump, tiny_config

from flexgen.assets import root
from flexgen.contract import abi
from flexgen.contract.configs import broken_fence, merged, normalise
from flexgen.contract.ignored import NO_EFFECT
from flexgen.errors import ConfigError
from flexgen.runtime.loading.config import Config, read_config
from flexgen.runtime.loading.model import Model
from flexgen.runtime.loading.package import PackageError, choose, find_packages, load_package
from flexgen.spec.load import load_spec

SPECS = sorted(find_packages())
TABLE = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}


def tiny(spec: str) -> dict[str, Any]:
    return copy.deepcopy(load_spec(root("specs") / f"{spec}.yaml").model.tiny)


def config_of(raw: dict[str, Any], **options: Any) -> Config:
    settings = {"model_types": ("m",), "defaults": {}, "require": {}, "ignore": (), "layers_by": "layer_types"}
    return Config({"model_type": "m", **raw}, **{**settings, **options})


def saved(raw: dict[str, Any], folder: Any) -> dict[str, Any]:
    """What transformers writes for a config."""
    from transformers import AutoConfig

    fields = {key: value for key, value in copy.deepcopy(raw).items() if key != "model_type"}
    AutoConfig.for_model(raw["model_type"], **fields).save_pretrained(folder)
    return read_config(folder)


# ---------------------------------------------------------------- families


@pytest.mark.parametrize("spec", SPECS)
def test_written_by_hand_and_saved_by_transformers_bind_to_equal_dims(spec, tmp_path):
    walker = load_package(find_packages()[spec]).walker
    forms = [tiny(spec), saved(tiny(spec), tmp_path)]
    by_hand, by_transformers = (walker.Dims.from_config(normalise(raw, walker.TEXT_CONFIG)) for raw in forms)
    assert by_hand == by_transformers


@pytest.mark.parametrize("spec", SPECS)
def test_saved_tiny_is_accepted_by_its_spec_alone(spec, tmp_path):
    raw = saved(tiny(spec), tmp_path)
    accepted = []
    for name, folder in find_packages().items():
        walker = load_package(folder).walker
        try:
            walker.Dims.from_config(normalise(raw, walker.TEXT_CONFIG))
        except ConfigError:
            continue
        accepted.append(name)
    assert accepted == [spec] == [choose(raw).name]


@pytest.mark.parametrize("spec", SPECS)
def test_defaults_are_those_of_transformers(spec, tmp_path):
    """A hub file that leaves a field out means what transformers would fill in."""
    defaults = load_package(find_packages()[spec]).walker.DEFAULTS
    raw = tiny(spec)
    filled = saved(raw, tmp_path)
    shared = (defaults.keys() & filled.keys()) - raw.keys()
    assert shared
    assert {field: filled[field] for field in shared} == {field: defaults[field] for field in shared}


# ---------------------------------------------------------------- one form


OLD_ROPE = {"rope_theta": 5000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}


@pytest.mark.parametrize(
    "raw",
    [
        {"rope_parameters": TABLE},
        OLD_ROPE,
        {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5000.0, "rope_parameters": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5000.0, "rope_parameters": TABLE, "rope_scaling": None},
    ],
)
def test_rope_keys_of_every_age_come_out_alike(raw):
    assert normalise(raw, None) == {"rope_parameters": TABLE}


def test_older_keys_reach_each_nested_table():
    raw = {"partial_rotary_factor": 0.5, "rope_parameters": {"a": {"rope_theta": 1.0}, "b": {"rope_theta": 2.0}}}
    tables = normalise(raw, None)["rope_parameters"]
    assert tables == {name: {"rope_theta": n, "partial_rotary_factor": 0.5} for name, n in (("a", 1.0), ("b", 2.0))}


def test_normalising_twice_changes_nothing_and_spares_the_input():
    raw = {"text_config": copy.deepcopy(OLD_ROPE), "tie_word_embeddings": True, "model_type": "m"}
    before = copy.deepcopy(raw)
    once = normalise(raw, "text_config")
    assert raw == before
    assert normalise(once, "text_config") == once
    assert once["tie_word_embeddings"] is True and once["model_type"] == "m"


@pytest.mark.parametrize(
    "raw, word",
    [
        ({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}}, "rope_theta"),
        ({"rope_scaling": {"factor": 2.0}, "rope_parameters": {"factor": 4.0}}, "rope_scaling"),
        ({"rope_parameters": {"type": "linear", "rope_type": "yarn"}}, "rope_type"),
        ({"rope_parameters": 3}, "rope_parameters"),
        ({"text_config": {"tie_word_embeddings": False}, "tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"text_config": [1]}, "text_config"),
    ],
)
def test_contradictions_are_refused(raw, word):
    with pytest.raises(ConfigError, match=word):
        normalise(raw, "text_config")


def test_defaults_lie_below_the_file_and_null_is_absent():
    filled = merged({"a": None, "b": {"c": 1, "d": None}}, {"a": 5, "b": {"c": 2, "d": 3, "e": 4}, "f": 6})
    assert filled == {"a": 5, "b": {"c": 1, "d": 3, "e": 4}, "f": 6}


@pytest.mark.parametrize("text, word", [("{", "not JSON"), ("[1]", "list"), (None, "missing")])
def test_unreadable_files_are_named(text, word, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=word) as caught:
        read_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    "reader, value",
    [
        ("int", True), ("int", "64"), ("int", 64.0), ("int", -64), ("float", False), ("float", "1e-5"), ("float", float("nan")),
        ("float", float("inf")), ("flag", 1), ("flag", "true"), ("number", "1"), ("number", [1]),
    ],
)  # fmt: skip
def test_types_are_strict(reader, value):
    with pytest.raises(ConfigError, match="field is") as caught:
        getattr(config_of({"field": value}), reader)("field")
    assert repr(value) in str(caught.value)


def test_what_the_spec_divides_by_is_not_zero():
    raw = {**tiny("llama"), "num_attention_heads": 0}
    with pytest.raises(ConfigError, match="num_attention_heads is 0, and the spec divides by it"):
        load_package(find_packages()["llama"]).walker.Dims.from_config(normalise(raw, None))


ODD = (0, -1, 10**400, 1e308, "", [], {}, None, True, [None], [[]], {"a": {}}, 0.5, float("nan"))


def places(node: Any) -> list[tuple[Any, Any]]:
    """Everything that could hold another value: (holder, key)."""
    keys = list(node) if isinstance(node, dict) else [0] if isinstance(node, list) and node else []
    return [(node, key) for key in keys] + [place for key in keys for place in places(node[key])]


@pytest.mark.parametrize("spec", SPECS)
def test_any_value_of_any_field_is_bound_or_refused_by_name(spec):
    walker = load_package(find_packages()[spec]).walker
    raw = tiny(spec)
    for holder, key in places(raw):
        good = holder[key]
        for holder[key] in ODD:
            try:
                walker.Dims.from_config(normalise(raw, walker.TEXT_CONFIG))
            except ConfigError as error:
                assert len(str(error)) < 2000
        holder[key] = good


def test_the_first_path_that_is_present_wins():
    config = config_of({"a": None, "b": 2, "c": 3})
    assert config.int("a", "b", "c") == 2
    assert config.int("a", "missing", default=7) == 7
    assert config.int("zero", default=0) == 0
    with pytest.raises(ConfigError, match="missing and gone"):
        config.int("missing", "gone")


def test_a_flag_counts_as_a_number_in_arithmetic():
    config = config_of({"wide": True, "factor": 1.5})
    assert (config.number("wide"), config.number("factor")) == (1, 1.5)


TYPES = {"layer_types": ["s", "f", "f"], "head_dim": 8}


def overrides(layers: dict[str, Any]) -> Config:
    return config_of({**TYPES, "per_layer_config": layers})


def test_overrides_of_one_layer_type_are_read_together():
    config = overrides({"1": {"head_dim": 16}, "2": {"head_dim": 16}})
    assert (config.int("head_dim"), config.int("layers.f.head_dim"), config.int("layers.s.head_dim")) == (8, 16, 8)
    config.optional("layer_types")
    config.finish()


def test_layers_without_an_override_read_the_top_level_field():
    config = overrides({})
    assert config.int("layers.f.head_dim") == 8
    config.optional("layer_types")
    config.finish()


def test_without_overrides_the_next_path_is_taken():
    assert config_of({**TYPES, "global_head_dim": 32}).int("layers.f.head_dim", "global_head_dim") == 32


@pytest.mark.parametrize("layers", [{"1": {"head_dim": 16}, "2": {"head_dim": 4}}, {"1": {"head_dim": 16}}])
def test_overrides_must_agree(layers):
    with pytest.raises(ConfigError, match="layer 1"):
        overrides(layers).int("layers.f.head_dim")


@pytest.mark.parametrize("layers", [{"0": {"head_dim": 4}}, {"1": {"kv": 1}}, {"7": {"head_dim": 1}}])
def test_an_override_that_nothing_reads_is_refused(layers):
    config = overrides(layers)
    config.int("head_dim"), config.int("layers.f.head_dim"), config.optional("layer_types")
    with pytest.raises(ConfigError, match=r"per_layer_config\."):
        config.finish()


# ---------------------------------------------------------------- fences and leftovers


@pytest.mark.parametrize(
    "wanted, good, bad",
    [
        (0, [0], [False, None, 1]),
        (False, [False], [0, None, True]),
        ("silu", ["silu"], ["gelu", None]),
        ([None, "vision"], [None, "vision"], ["all", True]),
        ({"min": 1}, [1, 2], [0, True, None, "1"]),
    ],
)
def test_fences(wanted, good, bad):
    assert all(broken_fence({"f": value}, {"f": wanted}) is None for value in good)
    assert all("f is" in broken_fence({"f": value}, {"f": wanted}) for value in bad)


def test_an_unread_leaf_is_refused_with_both_ways_out():
    raw = {"known": 1, "nested": {"left": 1, "read": 2}, "quiet": None, "use_cache": True}
    config = config_of(raw)
    config.int("known"), config.int("nested.read")
    with pytest.raises(ConfigError, match=r"nested\.left") as caught:
        config.finish()
    assert "ignore_config=['nested.left']" in str(caught.value) and "checkpoint.ignore" in str(caught.value)
    config_of(raw, ignore=("known", "nested")).finish()


def test_another_model_type_is_refused():
    with pytest.raises(ConfigError, match="'other'"):
        config_of({"model_type": "other"})


def test_activations_are_never_ignored():
    assert not {"hidden_act", "hidden_activation"} & NO_EFFECT.keys()
    assert all(NO_EFFECT.values())


# ---------------------------------------------------------------- packages


def test_no_package_lists_every_candidate_with_its_reason():
    with pytest.raises(ConfigError) as caught:
        choose({**tiny("llama"), "hidden_act": "gelu"})
    lines = str(caught.value).splitlines()[1:]
    assert [line.split(":")[0].strip() for line in lines] == SPECS
    assert "hidden_act is 'gelu'" in next(line for line in lines if line.startswith("  llama:"))


def copied(folder: Any, *names: str) -> Any:
    for name in names:
        shutil.copytree(root("generated") / "llama", folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_two_packages_are_ambiguous_until_one_is_named(tmp_path):
    both = copied(tmp_path, "one", "two")
    with pytest.raises(ConfigError, match="one, two; choose one with spec=NAME, or --spec NAME"):
        choose(tiny("llama"), generated=both)
    assert choose(tiny("llama"), spec="two", generated=both) == both / "two"
    assert choose(tiny("llama"), generated=both / "one") == both / "one"


@pytest.mark.parametrize("arguments, word", [({"spec": "lama"}, "lama"), ({"generated": "/nowhere"}, "flexgen build")])
def test_a_package_that_is_not_there(arguments, word):
    with pytest.raises(ConfigError, match=word):
        choose(tiny("llama"), **arguments)


def test_another_abi_names_the_build_command(tmp_path):
    folder = copied(tmp_path, "old") / "old"
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "abi": abi.ABI + 1}))
    with pytest.raises(PackageError, match=r"flexgen build specs/llama\.yaml"):
        load_package(folder)
    with pytest.raises(ConfigError, match=f"ABI {abi.ABI + 1}"):
        choose(tiny("llama"), generated=tmp_path)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_experts_per_tok": 0}, "send each token to 0 of 8 experts by config.json"),
        ({"num_experts_per_tok": 9}, "send each token to 9 of 8 experts by config.json"),
        ({"num_hidden_layers": 10**9}, "gives the model 1000000000 layers, and 10000 is the most"),
        ({"moe_intermediate_size": 0}, "each size must be a whole number, no less than 1"),
        ({"quantization_config": {"quant_method": "fp8"}}, "this checkpoint is quantised by 'fp8', .*FineGrainedFP8Config"),
    ],
)
def test_sizes_that_make_no_model_and_quantised_weights_are_refused(fields, message, tmp_path):
    config = tiny_config("qwen3_moe") | {"num_experts": 8} | fields
    with pytest.raises(ConfigError, match=message):
        Model.load(dump(config, tmp_path / "checkpoint"), device="cpu", load_format="dummy")


@pytest.mark.parametrize("device", ["nowhere", "meta", "cuda:99", 3.5])
def test_a_device_that_torch_cannot_use_is_named(device, tmp_path):
    with pytest.raises(ValueError, match=f"device is {device!r}"):
        Model.load(dump(tiny_config("llama"), tmp_path / "checkpoint"), device=device, load_format="dummy")


def test_a_file_in_place_of_a_directory_is_named(tmp_path):
    folder = dump(tiny_config("llama"), tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match=r"config.json is a file: give its directory"):
        Model.load(folder / "config.json", device="cpu")


def test_a_hand_edit_that_python_cannot_read_is_named(tmp_path):
    folder = shutil.copytree(root("generated") / "llama", tmp_path / "llama")
    (folder / "walker.py").write_text("def broken(:\n")
    with pytest.warns(UserWarning, match="edited by hand"), pytest.raises(PackageError, match=r"walker.py:1: .*run `flexgen build`"):
        load_package(folder, allow_edited=True)


def test_hand_edits_warn_and_take_effect(tmp_path):
    folder = copied(tmp_path, "mine") / "mine"
    before = load_package(folder)
    with (folder / "walker.py").open("a") as file:
        file.write("MINE = True\n")
    with pytest.raises(PackageError, match=r"edited by hand .*walker\.py; run `flexgen build specs/llama.yaml`.*allow_edited=True"):
        load_package(folder)
    with pytest.warns(UserWarning, match=r"walker\.py"):
        after = load_package(folder, allow_edited=True)
    assert after.walker.MINE and not hasattr(before.walker, "MINE")
    assert load_package(root("generated") / "llama").walker is not before.walker


@pytest.mark.parametrize("text", ["{", "[]", '{"abi": 1}'])
def test_a_broken_manifest_is_named(text, tmp_path):
    folder = copied(tmp_path, "mine") / "mine"
    (folder / "manifest.json").write_text(text)
    with pytest.raises(PackageError, match=r"mine/manifest\.json"):
        load_package(folder)
