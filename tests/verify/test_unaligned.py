"""What verify says where a reference computes the same in another order, or lacks a weight of the spec."""

from __future__ import annotations

import pytest

from flexgen.assets import root
from flexgen.compiler import check
from flexgen.errors import FlexgenError
from flexgen.render.build import write
from flexgen.render.render import render
from flexgen.verify.run import verify


def test_a_norm_after_a_transpose_condemns_nothing():
    """Hunyuan's class norms heads that it has transposed: the inner line is named, the rest is checked, and the spec is right."""
    report = verify("hunyuan_v1_dense")
    assert report.ok and report.lines_compared > 10
    text = report.to_text()
    assert "the input of w.q_norm could not be aligned with the reference's module" in text and "DIFFERS" not in text


def test_a_weight_that_the_reference_lacks_is_named_with_its_place_in_the_spec(tmp_path, monkeypatch):
    text = (root("specs") / "hunyuan_v1_dense.yaml").read_text()
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs/hunyuan_v1_dense.yaml").write_text(text.replace("self_attn.query_layernorm", "self_attn.q_norm"))
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "made", render(check(tmp_path / "specs/hunyuan_v1_dense.yaml").architecture))
    wanted = r"lacks layers\.0\.self_attn\.q_norm\.weight, which q_norm needs \(spec: attention\.attention\)"
    with pytest.raises(FlexgenError, match=wanted):
        verify(tmp_path / "made")
