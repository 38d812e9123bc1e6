"""The golden corpus: what every mistake prints, to the character."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent.parent / "bad_specs"
_module = importlib.util.spec_from_file_location("bad_specs_make", HERE / "make.py")
make = importlib.util.module_from_spec(_module)
_module.loader.exec_module(make)
EXPECTED = {
    part.split("\n", 1)[0]: part.split("\n", 1)[1].rstrip("\n")
    for part in (HERE / "expected.txt").read_text().split("=== ")[1:]
}


def test_corpus_is_large_and_complete():
    assert len(make.CASES) >= 60
    assert list(EXPECTED) == list(make.CASES)


@pytest.mark.parametrize("name", make.CASES)
def test_message(name):
    text = make.verdict(name).rstrip("\n")
    assert text.startswith("error[SPEC")
    assert text == EXPECTED[name]
    assert not re.search(r"pydantic|jinja|Traceback|Input should|type=|literal_error", text, re.I)
