"""Workloads, the files that keep figures, and the page that is made of them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from flexgen.bench import page
from flexgen.bench.page import results_page, write_page
from flexgen.bench.results import Result, load_results, versions
from flexgen.bench.shapes import SHAPES
from flexgen.bench.workloads import BATCHES, WORKLOADS
from flexgen.errors import FlexgenError

GIB = 2**30
SAMPLE = Result(
    engine="flexgen",
    model="llama-8b",
    workload="decode",
    batch=8,
    repeats=3,
    tokens_per_second=2000.0,
    bound_tokens_per_second=2200.0,
    experts_touched=None,
    peak_bytes=40 * GIB,
    weight_bytes=15 * GIB,
    kv_bytes=24 * GIB,
    startup_seconds={"load": 2.0, "compile": 8.25, "capture": 3.0},
    uncaptured=[],
    device="NVIDIA H200",
    versions={"python": "3.11.9", "torch": "2.11.0"},
    commit="abc1234",
    command="flexgen bench llama-8b",
)
RESULTS = [
    SAMPLE,
    replace(SAMPLE, batch=1, tokens_per_second=250.0, bound_tokens_per_second=276.0),
    replace(SAMPLE, workload="rollout", batch=256, tokens_per_second=20000.0),
    replace(SAMPLE, engine="transformers", tokens_per_second=250.0, bound_tokens_per_second=None, kv_bytes=None),
    replace(SAMPLE, model="tiny", experts_touched=3.25, uncaptured=["sampling 8 rows runs without a graph: no"]),
]
PAGE = """\
## llama-8b

![tokens a second over batch size](plots/llama-8b.svg)

| workload | batch | tok/s | of the bound | vLLM | against vLLM | transformers | against it | experts touched |
|---|---:|---:|---:|---:|---:|---:|---:|---:|
| decode | 1 | 250 | 91% | 201 | 1.24 x |  |  |  |
| decode | 8 | 2000 | 91% | 1584 | 1.26 x | 250 | 8.00 x |  |
| rollout | 256 | 20000 | 909% | 14470 | 1.38 x |  |  |  |

NVIDIA H200, python 3.11.9, torch 2.11.0.
Start-up: load 2.0 s, compile 8.2 s, capture 3.0 s (vLLM: 55 to 73 s).
Peak memory 40.0 GiB: weights 15.0, keys, values and state 24.0, the rest 1.00.

## tiny

![tokens a second over batch size](plots/tiny.svg)

| workload | batch | tok/s | of the bound | vLLM | against vLLM | transformers | against it | experts touched |
|---|---:|---:|---:|---:|---:|---:|---:|---:|
| decode | 8 | 2000 | 91% |  |  |  |  | 3.2 |

NVIDIA H200, python 3.11.9, torch 2.11.0.
Start-up: load 2.0 s, compile 8.2 s, capture 3.0 s.
Peak memory 40.0 GiB: weights 15.0, keys, values and state 24.0, the rest 1.00.
Without a graph: sampling 8 rows runs without a graph: no.
"""


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_no_prompt_is_another_one(workload):
    """Nor the start of another one: a cached prefix would spare work that is to be measured."""
    runs = range(workload.repeats + 1)
    prompts = [ids for run in runs for ids in workload.prompts(max(BATCHES[workload.name]), run)]
    assert {len(ids) for ids in prompts} == {workload.prompt}
    assert len({ids[0] for ids in prompts}) == len(prompts)
    assert min(map(min, prompts)) >= 0 and max(map(max, prompts)) < min(each["vocab_size"] for each in SHAPES.values())


def test_a_figure_comes_back_from_its_file_as_it_was(tmp_path):
    paths = [result.save(tmp_path / "new" / "folder") for result in RESULTS]
    assert paths[0].name == "decode-llama-8b-8-flexgen.json"
    assert load_results(tmp_path / "new" / "folder") == sorted(RESULTS, key=lambda result: result.name)
    assert load_results(tmp_path / "nothing") == []


def test_a_file_that_is_no_figure_is_named(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(asdict(SAMPLE) | {"speed": 1}))
    with pytest.raises(ValueError, match=r"a.json is no measured figure: .*speed.*; delete it, or measure it again"):
        load_results(tmp_path)
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ValueError, match=r"a.json is no measured figure"):
        load_results(tmp_path)


def test_versions_are_those_that_run():
    import torch

    assert versions()["torch"].split("+")[0] == torch.__version__.split("+")[0]


def test_the_page_shows_every_figure_beside_its_peers():
    text = results_page(RESULTS)
    assert text.startswith("# Measured speed\n\nMade by `flexgen bench --page` from `results/engines/`")
    assert text[text.index("## ") :] == PAGE
    assert results_page(RESULTS[::-1]) == text
    assert "Nothing is measured" in results_page([])


def test_plots_are_the_same_bytes_on_every_run(tmp_path):
    first, second = (write_page(RESULTS, tmp_path / name) for name in ("a", "b"))
    assert [path.relative_to(tmp_path / "a").as_posix() for path in first] == [
        "RESULTS.md", "plots/llama-8b.svg", "plots/tiny.svg"]  # fmt: skip
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    svg = first[1].read_text()
    assert all(f">{label}<" in svg for label in ("flexgen", "transformers", "vLLM 0.26.0", "bound", "llama-8b"))


@pytest.mark.filterwarnings("error")
def test_models_without_a_figure_of_decode_have_no_plot(tmp_path):
    only_rollout = [replace(SAMPLE, model="tiny", workload="rollout")]
    assert [path.name for path in write_page(only_rollout, tmp_path)] == ["RESULTS.md"]
    assert "](plots/" not in results_page(only_rollout)


def test_without_matplotlib_the_page_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "find_spec", lambda name: None)
    with pytest.raises(FlexgenError, match=r"pip install 'flexgen\[bench\]'"):
        write_page(RESULTS, tmp_path)
    assert not list(tmp_path.iterdir())
