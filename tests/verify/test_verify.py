"""verify is clean for every shipped package, and names the line of a package that was broken on purpose."""

from __future__ import annotations

import functools
import inspect
import json
import shutil
import sys

import pytest
import torch
from tiny import tiny_config

from flexgen.assets import root
from flexgen.compiler import UsageError, check
from flexgen.errors import ConfigError, FlexgenError
from flexgen.render.build import write
from flexgen.render.render import render
from flexgen.runtime.loading.package import find_packages
from flexgen.verify import reference, run, verify
from flexgen.verify.report import Report, Row

torch.set_num_threads(1)


LEAST_LINES = {"granitemoe": 14, "phimoe": 12}
"""Of packages whose files name modules as transformers' classes do not."""


@pytest.mark.parametrize("name", find_packages())
def test_shipped_packages_agree(name):
    report = verify(name)
    assert report.ok, report.to_text()
    assert [row.mode for row in report.rows] == ["whole prefill", "chunked prefill", "decode", "batched decode"]
    assert report.lines_compared >= LEAST_LINES.get(name, 15)
    assert json.loads(report.to_json())["ok"] is True


BROKEN = {
    # name: (spec, file, function, text, replacement, layer, block)
    "residual": ("llama", "walker.py", "full_layer", "x_TD = x_TD + h_TD", "x_TD = x_TD - h_TD", 0, "block[0]"),
    "norm": ("qwen3", "walker.py", "block", "w.input_layernorm", "w.post_attention_layernorm", 0, "block[0]"),
    "norm eps": ("qwen3", "walker.py", "block", "w.post_attention_layernorm, dims.eps",
                 "w.post_attention_layernorm, 1.0", 0, "block[1]"),
    "activation": ("llama", "walker.py", "mlp", "F.silu(gate_TI)", "F.gelu(gate_TI)", 0, "block[1]"),
    "bias": ("llama", "attention.py", "full_attention", "w.qkv, w.qkv_bias", "w.qkv", 0, "block[0]"),
    "window": ("gpt_oss", "attention.py", "sliding_attention", "o_TNH = attend(", "o_TNH = 2 * attend(", 0, "block[0]"),
    "gain": ("gemma4_moe", "walker.py", "block", "return x_TD * w.layer_scalar", "return x_TD * 1", 0, "block[2]"),
    "branch": ("gemma4_moe", "walker.py", "block", "h_TD = mlp_TD + moe_TD", "h_TD = mlp_TD", 0, "block[1]"),
    "router input": ("gemma4_moe", "walker.py", "moe_route", "h_TD = h_TD * (1 / math.sqrt(dims.hidden))", "h_TD = h_TD * 1",
                     0, "block[1]"),
    "side input": ("gemma4_e", "walker.py", "block", " * per_layer_TI", "", 0, "block[2]"),
    "shared pages": ("gemma4_e", "attention.py", "full_shared_attention", "o_TNH = attend(", "o_TNH = 1 + attend(", 5,
                     "block[0]"),
    "delta rule": ("qwen3_5", "attention.py", "gdn_mixer", "o_TNH = delta_rule(", "o_TNH = 1 + delta_rule(", 0, "block[0]"),
    "embedding": ("gemma4_dense", "walker.py", "forward", "* rounded(math.sqrt(dims.hidden), w.embed_tokens.dtype)", "* 2",
                  None, None),
    "head": ("gemma4_dense", "walker.py", "logits", "dims.softcap)", "2 * dims.softcap)", None, None),
}  # fmt: skip


def break_package(spec, file, function, text, replacement, folder):
    """A copy of a package with one line changed -> its folder and the line's number."""
    shutil.copytree(root("generated") / spec, folder, ignore=shutil.ignore_patterns("__pycache__"))
    lines = (folder / file).read_text().splitlines()
    start = next(n for n, line in enumerate(lines) if line.strip().startswith(f"def {function}("))
    at = next(n for n in range(start, len(lines)) if text in lines[n])
    lines[at] = lines[at].replace(text, replacement)
    (folder / file).write_text("\n".join(lines) + "\n")
    return folder, at + 1


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_line_is_named(name, tmp_path):
    spec, file, function, text, replacement, layer, block = BROKEN[name]
    folder, line = break_package(spec, file, function, text, replacement, tmp_path / "package")
    report = verify(folder)
    assert not report.ok
    found = report.first_difference
    assert found is not None
    assert (found.file, found.line, found.layer, found.block) == (str(folder / file), line, layer, block)
    assert report.to_text().count("DIFFERS") == 4
    assert f"{found.file}:{line}: " in report.to_text()


def test_a_mistake_between_two_products_is_bracketed(tmp_path):
    edit = ("attention.py", "full_attention", "k_TKH = rotate(k_TKH", "k_TKH = 2 * rotate(k_TKH")
    folder, line = break_package("qwen3", *edit, tmp_path / "package")
    found = verify(folder).first_difference
    assert found.agreed < line <= found.line
    assert found.line - found.agreed <= 5


def test_a_checkpoint(tmp_path):
    reference.save(reference.tiny(tiny_config("qwen3"), seed=1), tmp_path)
    report = verify("qwen3", checkpoint=tmp_path)
    assert report.ok
    assert str(tmp_path) in report.to_text()


def test_every_tensor_is_random():
    model = reference.tiny(tiny_config("gemma4_moe"))
    for name, tensor in model.state_dict().items():
        assert tensor.numel() == 1 or tensor.std() > 0, name


def test_what_is_not_there_is_named_and_never_asked_for_elsewhere(tmp_path):
    with pytest.raises(ConfigError, match="is missing: a checkpoint is a directory"):
        verify("llama", checkpoint=tmp_path / "nope")
    with pytest.raises(UsageError, match="device is 'nonsense'"):
        verify("llama", device="nonsense")


def test_a_type_that_transformers_lacks_is_named():
    with pytest.raises(FlexgenError, match="no model of type 'mine' to compare with: give `tiny`") as error:
        reference.tiny({**tiny_config("llama"), "model_type": "mine"})
    assert len(str(error.value)) < 300


def test_a_report_that_holds_nothing_or_nan_is_not_ok():
    assert not Report("llama", "nothing").ok
    assert not Row("decode", float("nan"), 1e-4).ok
    assert json.loads(Report("llama", "nan", [Row("decode", float("nan"), 1e-4)]).to_json())["rows"][0]["max_error"] is None


def test_errors_name_what_is_wrong():
    with pytest.raises(UsageError, match="no generated package `lama`"):
        verify("lama")
    with pytest.raises(UsageError, match=r"manifest.json is a file, and no spec: give a spec, or the folder of a package"):
        verify(root("generated") / "llama" / "manifest.json")


def test_a_weight_that_transformers_does_not_have_is_named(tmp_path, monkeypatch):
    text = (root("specs") / "llama.yaml").read_text()
    spec = tmp_path / "misspelt.yaml"
    text = text.replace("weight: post_attention_layernorm", "weight: post_attention_layernrm")
    spec.write_text(text.replace("name: llama", "name: misspelt"))
    write(tmp_path / "misspelt", render(check(spec).architecture))
    monkeypatch.chdir(tmp_path)
    lacks = r"^transformers' own model lacks layers.0.post_attention_layernrm.weight, .*: a weight of the spec has another name"
    with pytest.raises(UsageError, match=lacks):
        verify(tmp_path / "misspelt")


def test_a_package_whose_spec_is_elsewhere_asks_for_a_checkpoint(tmp_path):
    folder = shutil.copytree(root("generated") / "llama", tmp_path / "package")
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"name": "elsewhere"}))
    with pytest.raises(UsageError, match=r"no spec `elsewhere` to take the tiny model from: .* or give --checkpoint DIR"):
        verify(folder)


def test_the_oracle_on_a_host_runs_no_kernels_for_gpus(monkeypatch):
    """As where flash-linear-attention is installed, which takes the place of functions of transformers."""
    modeling = sys.modules[type(reference.tiny(tiny_config("qwen3_5"))).__module__]

    def needs_a_gpu(own):
        @functools.wraps(own)
        def kernel(*_, **__):
            raise ValueError("cannot be accessed from Triton (cpu tensor?)")

        return kernel

    for name in reference._MIXERS:
        monkeypatch.setattr(modeling, name, needs_a_gpu(inspect.unwrap(getattr(modeling, name))))
    tokens = list(range(9))
    whole = reference.logits(reference.tiny(tiny_config("qwen3_5")), tokens)
    monkeypatch.undo()
    assert torch.equal(whole, reference.logits(reference.tiny(tiny_config("qwen3_5")), tokens))


def test_a_package_older_than_its_spec_is_refused(tmp_path, monkeypatch):
    folder = shutil.copytree(find_packages()["llama"], tmp_path / "llama")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"digest": "another"}))
    refused = r"was not built from .*llama.yaml as it is now: run `flexgen build"
    with pytest.raises(UsageError, match=refused):
        verify(folder)
    monkeypatch.setattr(run, "read_manifest", lambda _: manifest | {"digest": "another"})
    with pytest.raises(UsageError, match=refused):
        verify("llama", checkpoint=tmp_path)
