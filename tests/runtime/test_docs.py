"""The pages of the engine name every parameter and metric, and nothing that does not exist."""

import inspect
import re
from dataclasses import fields

from typer.main import get_command

from flexgen.assets import root
from flexgen.bench.shapes import shape
from flexgen.cli import app
from flexgen.runtime.llm import LLM
from flexgen.runtime.options import EngineOptions
from flexgen.runtime.requests.params import SamplingParams
from flexgen.runtime.surface import NEUTRAL_FIELDS
from tests.runtime.test_engine import engine

PAGE = (root("specs").parent / "docs" / "parameters.md").read_text(encoding="utf-8")


def section(title):
    return PAGE.split(f"## {title}")[1].split("\n## ")[0]


def first_column(text):
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def test_every_argument_of_llm_is_documented():
    named = set(inspect.signature(LLM.__init__).parameters) - {"self", "options"}
    assert first_column(section("`LLM(model, ...)`")) == named | set(EngineOptions.names())


def test_every_sampling_parameter_is_documented():
    assert first_column(section("`SamplingParams`")) == {field.name for field in fields(SamplingParams)} - NEUTRAL_FIELDS.keys()


def test_every_metric_is_documented():
    assert all(f"`{name}`" in section("Methods") for name in engine().metrics())


def test_the_commands_that_measure_are_ones_that_exist():
    page = (root("specs").parent / "docs" / "performance.md").read_text(encoding="utf-8")
    lines = [line.split("#")[0] for line in re.findall(r"^flexgen bench.*", page, flags=re.MULTILINE)]
    assert len(lines) == 5
    command = get_command(app).commands["bench"]
    for line in lines:
        given = command.make_context("bench", line.split()[2:]).params
        assert all(map(shape, given["models"] or ()))
    options = set(re.findall(r"^\| `(\w+)", page.split("option of `LLM`")[1], flags=re.MULTILINE))
    assert options == {"enforce_eager", "cudagraph_capture_sizes", "lazy_capture"} <= set(EngineOptions.names())
