"""`flexgen new`: drafts pass `check`, known families build the same code, and nothing of a config goes unnamed."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import SOME
from transformers import AutoConfig

from flexgen.assets import root
from flexgen.compiler import UsageError, check
from flexgen.contract.configs import normalise
from flexgen.new.config import ConfigFileError
from flexgen.new.write import draft, write
from flexgen.render.render import render
from flexgen.spec.load import load_spec, parse_spec

MULTIMODAL = {"gemma4_dense": "gemma4", "gemma4_moe": "gemma4", "qwen3_5": "qwen3_5", "qwen3_5_moe": "qwen3_5_moe"}


def tiny(spec: str) -> dict:
    return copy.deepcopy(load_spec(root("specs") / f"{spec}.yaml").model.tiny)


def config_class(model_type: str, folder: Path, **fields) -> Path:
    """A config.json as transformers' own class writes it, every field included."""
    AutoConfig.for_model(model_type, **fields).to_json_file(folder / "config.json", use_diff=False)
    return folder / "config.json"


def dump(config: dict, folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


def built(path: Path) -> dict[str, str]:
    checked = check(path)
    assert checked.architecture is not None, [str(d.message) for d in checked.diagnostics]
    return render(checked.architecture)


def same_code(made: dict[str, str], wanted: dict[str, str], name: str, spec: str) -> bool:
    """Equal but for the name in the header and in the first docstring."""
    files = ("walker.py", "attention.py", "merge.py")
    return all(re.sub(rf"\b{name}\b", spec, made[file]) == wanted[file] for file in files)


@pytest.mark.parametrize("spec", SOME)
@pytest.mark.parametrize("form", ["hub", "saved", "nested"])
def test_known_families_build_the_same_code(spec, form, tmp_path):
    config = tiny(spec)
    if form == "saved":
        path = config_class(config.pop("model_type"), tmp_path, **config)
    elif form == "nested":
        if spec not in MULTIMODAL:
            pytest.skip("this family has no multimodal form")
        outer = {"model_type": MULTIMODAL[spec], "text_config": config, "vision_config": {"depth": 2}}
        path = dump(outer, tmp_path)
    else:
        path = dump(config, tmp_path)
    made, source = draft("drafted", None, path)
    assert source.endswith(f"{spec}.yaml, which describes this config")
    assert not made.unsupported and made.decisions == 0, made.text[:1500]
    write(tmp_path / "drafted.yaml", made.text, force=False)
    assert same_code(built(tmp_path / "drafted.yaml"), built(root("specs") / f"{spec}.yaml"), "drafted", spec)


@pytest.mark.parametrize("spec", SOME)
def test_a_copy_of_a_spec_builds_the_same_layers(spec, tmp_path):
    made, _ = draft("another", spec, None)
    write(tmp_path / "another.yaml", made.text, force=False)
    original = (root("specs") / f"{spec}.yaml").read_text()
    assert made.decisions >= 10 and "# TODO decide: the values of `model_type`" in made.text
    kept = [line for line in original.splitlines() if not re.match(r"\s*(name|model_types|model_type):", line)]
    assert all(line in made.text.splitlines() for line in kept)
    files, wanted = built(tmp_path / "another.yaml"), built(root("specs") / f"{spec}.yaml")
    assert files["attention.py"].replace("another", spec) == wanted["attention.py"]
    assert load_spec(tmp_path / "another.yaml").model.checkpoint.model_types == ["another"]


UNKNOWN = {
    "seed_oss": ("hunyuan_v1_dense", ()),
    "olmo": ("hunyuan_v1_dense", ()),
    "gpt_bigcode": ("gpt2", ()),
    "hunyuan_v1_moe": ("olmoe", ()),
    "deepseek_v3": ("glm4_moe", ("kv_lora_rank", "q_lora_rank")),
    "persimmon": ("gpt_neox", ()),
    "stablelm": (None, ()),
    "mamba2": (None, ("state_size", "conv_kernel")),
    "falcon_h1": (None, ("mamba_d_state", "mlp_multipliers")),
    "lfm2": (None, ("conv_L_cache",)),
    "dbrx": (None, ()),
}


@pytest.mark.parametrize("model_type", UNKNOWN)
def test_unknown_families_get_a_draft_that_says_what_it_lacks(model_type, tmp_path):
    nearest, unsupported = UNKNOWN[model_type]
    fields = {"attn_config": {"clip_qkv": 8.0}} if model_type == "dbrx" else {}
    path = config_class(model_type, tmp_path, **fields)
    made, source = draft("drafted", None, path)
    assert "which is the nearest family" in source
    assert nearest is None or f"/{nearest}.yaml" in source, source
    write(tmp_path / "drafted.yaml", made.text, force=False)
    built(tmp_path / "drafted.yaml")
    for field in unsupported:
        assert any(line.startswith(f"{field}: ") for line in made.unsupported), (field, made.unsupported)
        assert f"#   {field}: " in made.text
    assert made.decisions > 10 and f'model_types: ["{model_type}"]' in made.text


def test_every_field_of_a_config_is_read_or_named(tmp_path):
    """What the draft does not read, it names: the engine would refuse each of them."""
    from flexgen.new.config import read
    from flexgen.new.reads import fit, leaves

    for model_type in UNKNOWN:
        path = config_class(model_type, tmp_path)
        made, _ = draft("drafted", None, path)
        (tmp_path / "drafted.yaml").write_text(made.text)
        left = fit(load_spec(tmp_path / "drafted.yaml"), read(path)).unread
        assert all(f"{field}: " in made.text for field in left), (model_type, left)
        assert set(left) <= {field for field, _ in leaves(read(path).text)}


def test_marks_stand_where_the_config_differs(tmp_path):
    path = config_class("mpt", tmp_path)
    text = draft("drafted", None, path)[0].text
    mark = "  # TODO decide: config.json states no `hidden_size` nor `n_embed`; is `d_model` the same?\n"
    assert f"{mark}  hidden: d_model or n_embed\n" in text
    config = {**tiny("llama"), "model_type": "odd", "hidden_act": "mish", "attn_logit_softcapping": 50.0}
    text = draft("drafted", None, dump(config, tmp_path))[0].text
    assert "# TODO decide: hidden_act is 'mish', and must be 'xielu' in " in text
    assert "`attn_logit_softcapping: 50.0` is read by nothing: a soft cap on attention scores, see `attention.*.softcap`" in text


def test_a_known_type_that_no_spec_describes_starts_from_its_family(tmp_path):
    config = {**tiny("gemma4_moe"), "num_kv_shared_layers": 2}
    made, source = draft("drafted", None, dump(config, tmp_path))
    assert "gemma4_moe.yaml, which is the nearest family" in source
    assert "# TODO decide: num_kv_shared_layers is 2, and must be 0 in " in made.text


def test_a_file_name_cannot_break_out_of_the_comment(tmp_path):
    path = tmp_path / "a\nname: b\u2028.json"
    path.write_text(json.dumps({**tiny("llama"), "model_type": "odd", "x\ny: z": 1}))
    made, _ = draft("drafted", None, path)
    assert "a?name: b?.json" in made.text and "x?y: z: 1" in made.text


def test_an_unread_field_of_a_known_family_is_named(tmp_path):
    made, source = draft("drafted", None, dump({**tiny("llama"), "strange": [1, {"a": "b\n# c"}]}, tmp_path))
    assert "describes this config" in source
    assert "# TODO decide: `strange: " in made.text and made.decisions == 1


def test_values_that_a_known_family_does_not_know_are_marked(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    made, _ = draft("drafted", None, dump({**tiny("llama"), "rope_parameters": rope}, tmp_path))
    assert "  # TODO decide: config.json has rope type dynamic, which is not among `types`\n  rope: {" in made.text
    layers = ["full_attention", "chunked_attention", "full_attention", "full_attention"]
    made, _ = draft("drafted", None, dump({**tiny("qwen3"), "layer_types": layers}, tmp_path))
    mark = "  # TODO decide: `layer_types` of config.json has chunked_attention, which is no key of `kinds`\n  - {by: layer_types"
    assert mark in made.text and made.decisions == 1


def test_nested_text_of_an_unknown_family(tmp_path):
    config = {**tiny("llama"), "model_type": "inner"}
    path = dump({"model_type": "outer", "llm_config": config}, tmp_path)
    made, _ = draft("drafted", None, path)
    assert '  text_config: llm_config\n  model_types: ["inner", "outer"]' in made.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{\n  "model_type": "llama",\n  oops\n}', r"config\.json:3:3: this is not JSON"),
        (b"[1, 2]", "holds a list, and a config.json is an object"),
        (b"7", "holds a number"),
        (b"\xff\xfe", "byte 0 is not UTF-8"),
        (b"{}", "has no `model_type`"),
        (b'{"model_type": 3}', "has no `model_type`"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"model_type": "llama", "rope_parameters": 3}', "rope_parameters is 3"),
    ],
)
def test_configs_that_are_none(content, message, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(Exception, match=message) as raised:
        draft("drafted", None, tmp_path)
    assert type(raised.value).__name__ in ("ConfigFileError", "ConfigError")


def test_odd_values_make_no_traceback(tmp_path):
    """Types that no config has: the draft names them, and stays a spec."""
    for field in ("hidden_size", "layer_types", "rope_parameters", "num_experts"):
        for value in ([], [[1]], {"a": {"b": None}}, -1e300, "quote\" ' # {}\n- x"):
            if field == "rope_parameters" and not isinstance(value, dict):
                continue
            made, _ = draft("drafted", None, dump({**tiny("llama"), "model_type": "odd", field: value}, tmp_path))
            assert "name: drafted" in made.text


def test_refusals(tmp_path):
    with pytest.raises(ConfigFileError, match="does not exist"):
        draft("drafted", None, tmp_path / "config.json")
    with pytest.raises(UsageError, match="exactly one of --from"):
        draft("drafted", None, None)
    with pytest.raises(UsageError, match="no spec `nope`"):
        draft("drafted", "nope", None)
    for name in ("Upper", "../up", "a b", "1a", "a" * 41, ""):
        with pytest.raises(UsageError, match="cannot name a spec"):
            draft(name, "llama", None)


def test_writes_whole_or_not_at_all(tmp_path):
    path = tmp_path / "mine.yaml"
    write(path, "first\n", force=False)
    with pytest.raises(UsageError, match=r"is there already.*--force"):
        write(path, "second\n", force=False)
    assert path.read_text() == "first\n"
    write(path, "second\n", force=True)
    assert path.read_text() == "second\n"
    with pytest.raises(UsageError, match="is no directory"):
        write(tmp_path / "no" / "mine.yaml", "x", force=False)
    assert list(tmp_path.iterdir()) == [path]


def test_command_line(tmp_path):
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "flexgen", "new", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    made = run("mine", "--from", "llama")
    assert made.returncode == 0 and "wrote specs/mine.yaml" in made.stdout and (tmp_path / "specs/mine.yaml").exists()
    again = run("mine", "--from", "llama")
    assert again.returncode == 2 and "--force" in again.stderr
    (tmp_path / "config.json").write_text("{,}")
    bad = run("other", "--config", "config.json")
    assert bad.returncode == 3 and bad.stderr.startswith("error: config.json:1:2: this is not JSON")
    assert "Traceback" not in bad.stderr and not (tmp_path / "specs/other.yaml").exists()


@pytest.mark.parametrize("kind", ["olmo", "seed_oss", "glm"])
def test_a_draft_takes_the_defaults_of_the_config_class_and_its_values(kind, tmp_path):
    """Fields that the nearest family had are filled in by this class; flags and factors of `tiny` are this config's."""
    from transformers import CONFIG_MAPPING

    given = CONFIG_MAPPING[kind]().to_dict() | {"attention_bias": True, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(given))
    made, source = draft("mine", None, tmp_path / "config.json")
    data = parse_spec(made.text, "mine.yaml").data
    assert "the nearest family" in source
    filled = normalise(CONFIG_MAPPING[kind]().to_dict(), None)
    defaults = data["checkpoint"].get("defaults", {})
    assert defaults and {field: filled[field] for field in defaults if field in filled} == {
        field: value for field, value in defaults.items() if field in filled
    }
    tiny = data["tiny"]
    flags = [field for field, value in tiny.items() if isinstance(value, bool) and isinstance(given.get(field), bool)]
    assert flags and all(tiny[field] == given[field] for field in flags)
    sizes = [value for field, value in tiny.items() if field in ("hidden_size", "num_hidden_layers", "vocab_size")]
    assert max(sizes) < 300
