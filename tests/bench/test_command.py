"""`flexgen bench` from end to end on shapes small enough for a host, and what it says to what it cannot measure."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from flexgen import cli
from flexgen.bench import command
from flexgen.bench.engines import engine_named
from flexgen.bench.results import load_results
from flexgen.bench.run import measure
from flexgen.bench.shapes import SHAPES
from flexgen.bench.workloads import DECODE, Workload

SMALL = {
    "vocab_size": 6000,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2}


@pytest.fixture(autouse=True)
def small_shapes(monkeypatch):
    monkeypatch.setitem(SHAPES, "small", SHAPES["llama-8b"] | SMALL)
    monkeypatch.setitem(SHAPES, "small-moe", SHAPES["qwen3-30b-a3b"] | SMALL | EXPERTS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    torch.set_num_threads(1)


def flexgen(monkeypatch, capsys, *arguments):
    """(exit code, stdout, stderr)"""
    monkeypatch.setattr(sys, "argv", ["flexgen", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code, *capsys.readouterr()


def test_a_model_is_measured_saved_and_shown(monkeypatch, capsys, tmp_path):
    out = tmp_path / "results" / "engines"
    arguments = ("bench", "small-moe", "--workload", "decode", "--batch", 2, "--batch", 5, "--layers", 2, "--out", out)
    code, shown, errors = flexgen(monkeypatch, capsys, *arguments)
    assert (code, errors) == (0, "")
    assert "small-moe, flexgen" in shown and "start-up: load" in shown and "without a graph: everything" in shown
    two, five = load_results(out)
    assert (two.model, two.workload, two.batch, five.batch) == ("small-moe-2-layers", "decode", 2, 5)
    for result in (two, five):
        assert 2 <= result.experts_touched <= min(8, 2 * result.batch)
        assert 0 < result.tokens_per_second < result.bound_tokens_per_second
        assert result.weight_bytes == 2 * (2 * 6000 * 32 + 32 + 2 * (2 * 32 * 32 + 2 * 16 * 32 + 16 + 64 + 8 * 32 + 8 * 3 * 16 * 32))
        assert result.command == f"flexgen bench small-moe --workload decode --batch 2 --batch 5 --layers 2 --out {out}"
        assert set(result.startup_seconds) == {"load", "compile", "capture"} and result.device == "CPU"
    assert two.experts_touched < five.experts_touched
    code, shown, _ = flexgen(monkeypatch, capsys, "bench", "--page", "--out", out)
    page, plot = tmp_path / "RESULTS.md", tmp_path / "plots" / "small-moe-2-layers.svg"
    assert code == 0 and shown.splitlines() == [f"wrote {page}", f"wrote {plot}"]
    assert f"| decode | 5 | {five.tokens_per_second:.0f} |" in page.read_text()


def test_transformers_is_measured_beside(monkeypatch, capsys, tmp_path):
    engines = ("--engine", "transformers", "--engine", "flexgen")
    code, _, errors = flexgen(monkeypatch, capsys, "bench", "small", "--workload", "decode", "--batch", 2, *engines,
                                  "--out", tmp_path)  # fmt: skip
    assert code == 0, errors
    ours, theirs = load_results(tmp_path)
    assert (ours.engine, theirs.engine) == ("flexgen", "transformers")
    assert ours.weight_bytes == theirs.weight_bytes and theirs.bound_tokens_per_second is None
    assert json.loads((tmp_path / theirs.name).read_text())["tokens_per_second"] == theirs.tokens_per_second > 0


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (["nope"], 3, "no model 'nope' to measure; there are llama-8b, qwen3-4b"),
        (["small", "nope"], 3, "no model 'nope'"),
        (["small", "--workload", "nope"], 3, "no workload 'nope'; there are decode, rollout"),
        (["small", "--engine", "flexgen", "--engine", "nope"], 3, "no engine 'nope' to measure; there are flexgen, tran"),
        (["qwen3.6-35b-a3b-bf16-state", "--engine", "transformers"], 3, "transformers cannot load qwen3.6-35b-a3b-bf16-state"),
        (["small", "--profile", "--repeats", "2"], 2, "exclude each other"),
        (["small", "--batch", "0"], 3, "batch 0 is out of range: it must be at least 1"),
        (["small", "--batch", "4", "--workload", "rollout"], 3, "--batch is of decode alone"),
        (["small", "--layers", "4"], 3, "layers=4 is out of range: small has 1 to 3"),
        (["small", "--profile"], 3, "--profile shows which kernels take a step on a CUDA device, and this machine has none"),
        (["small", "--profile", "--page"], 2, "exclude each other"),
        (["small", "--profile", "--engine", "flexgen"], 2, "exclude each other"),
        (["--page", "--workload", "decode"], 2, "exclude each other"),
        (["--page", "small"], 2, "--page takes but --out"),
        (["--page"], 2, "holds no figures to make a page of"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(arguments, code, message, monkeypatch, capsys, tmp_path):
    found = flexgen(monkeypatch, capsys, "bench", *arguments, "--out", tmp_path / "out")
    assert found[0] == code and found[1] == "" and message in found[2]
    assert not (tmp_path / "out").exists()


def test_a_batch_beyond_the_slots_is_refused():
    with pytest.raises(ValueError, match=r"batch 5 is more than this engine runs at once \(max_num_seqs=4\)"):
        list(measure("flexgen", "small", [(DECODE, 5)], max_num_seqs=4))


@pytest.mark.parametrize("engine, options", [("flexgen", {"max_num_seqs": 2}), ("transformers", {})])
def test_a_rollout_draws_as_many_tokens_as_it_says(engine, options):
    running = engine_named(engine)("small", **options)
    rollout = Workload("rollout", prompt=9, new=7, temperature=1.0, logprobs=0, repeats=1)
    assert running.generate(rollout.prompts(2, run=0), rollout) == 14
    running.close()


def test_a_figure_of_another_device_is_kept_and_nothing_is_measured(monkeypatch, capsys, tmp_path):
    arguments = ("bench", "small", "--workload", "decode", "--batch", 2, "--out", tmp_path)
    assert flexgen(monkeypatch, capsys, *arguments)[0] == 0
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text().replace('"CPU"', '"a card"'))
    before = path.read_text()
    monkeypatch.setattr(command, "measure", None)
    code, _, errors = flexgen(monkeypatch, capsys, *arguments)
    assert code == 3 and f"{path} holds a figure of a card, and this machine's are of CPU: give another --out" in errors
    assert path.read_text() == before
