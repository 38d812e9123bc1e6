"""`verify` in 16 bits: every spec rounds where transformers does, and a cast that is said wrongly is found."""

from __future__ import annotations

import pytest
from tiny import SPECS, reference, save, tiny_config

from flexgen.assets import root
from flexgen.compiler import UsageError, check
from flexgen.render.build import write
from flexgen.render.render import render
from flexgen.spec.load import load_spec
from flexgen.verify import verify
from flexgen.verify.bits import told_by_rounding

OTHER = {"before": "after", "after": "before", "fp32": "model", "model": "fp32"}


APART = {"bloom": "attend(", "falcon": "project(x_TD, w.qkv, w.qkv_bias)", "falcon_new": "project(x_TD, w.qkv, w.qkv_bias)"}
"""Specs whose `why` says where transformers rounds otherwise, and the line that this shows at."""


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec not in APART])
def test_every_spec_rounds_where_transformers_does(spec):
    report = verify(spec, dtype="bfloat16")
    assert report.ok, report.to_text()
    assert report.lines_compared > 3


@pytest.mark.parametrize("spec", APART)
def test_what_is_rounded_otherwise_is_what_the_spec_says(spec):
    found = verify(spec, dtype="bfloat16").first_difference
    assert found is not None and found.layer == 0 and APART[spec] in found.code
    assert "transformers" in load_spec(root("specs") / f"{spec}.yaml").model.attention["attention"].why


@pytest.mark.parametrize("spec", ["falcon", "falcon_new"])
def test_without_biases_these_round_where_transformers_does(spec, tmp_path):
    save(reference(tiny_config(spec, bias=False)), tmp_path)
    report = verify(spec, tmp_path, dtype="bfloat16")
    assert report.ok, report.to_text()


PLACES = [("llama", "norms.rms.cast"), ("gemma4_moe", "norms.rms.cast"),
          ("gpt_oss", "norms.rms.cast"), ("gpt_oss", "attention.full.softmax"), ("mixtral", "moe.moe.router.dtype")]  # fmt: skip


@pytest.mark.parametrize(("spec", "place"), PLACES)
def test_a_wrong_cast_is_found_in_16_bits_alone(spec, place, tmp_path, monkeypatch):
    described = load_spec(root("specs") / f"{spec}.yaml")
    assert place in told_by_rounding(described)
    *path, key = place.split(".")
    span = described.document.value_span((*path, key))
    lines = list(described.document.lines)
    line = lines[span.line - 1]
    was = line[span.column - 1 : span.end_column - 1]
    lines[span.line - 1] = line[: span.column - 1] + OTHER[was] + line[span.end_column - 1 :]
    (tmp_path / f"{spec}.yaml").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "made", render(check(tmp_path / f"{spec}.yaml").architecture))
    (tmp_path / "specs").mkdir()
    (tmp_path / f"{spec}.yaml").rename(tmp_path / "specs" / f"{spec}.yaml")
    assert verify(tmp_path / "made").ok
    report = verify(tmp_path / "made", dtype="bfloat16")
    assert not report.ok and report.first_difference is not None
    assert report.first_difference.spec or report.first_difference.layer is None


def test_bits_are_compared_on_a_host():
    with pytest.raises(UsageError, match="dtype is 'int8', and must be one of float32, bfloat16, float16"):
        verify("llama", dtype="int8")
    with pytest.raises(UsageError, match="is compared bit for bit, which kernels on 'meta' do not promise"):
        verify("llama", dtype="bfloat16", device="meta")
