"""Reading spec files: values by YAML 1.2, positions of everything, and what is refused."""

import math

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen.spec.codes import CODES
from flexgen.spec.diagnostics import Span, SpecError, render_text
from flexgen.spec.source import MAX_BYTES, MAX_DEPTH, Float, load, split_lines


def problems(text):
    with pytest.raises(SpecError) as error:
        load(text, "x.yaml")
    return error.value.diagnostics


def places(text):
    """(code, line, column) of each problem."""
    return [(item.code, item.span.line, item.span.column) for item in problems(text)]


def value(text):
    return load(f"a: {text}\n", "x.yaml").data["a"]


# ---------------------------------------------------------------- scalars


@pytest.mark.parametrize("text", ["", "~", "null", "Null", "NULL"])
def test_null(text):
    assert value(text) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *[("true", True), ("True", True), ("FALSE", False), ("0", 0), ("-0", 0), ("+12", 12), ("-7", -7)],
        *[("0o17", 15), ("0x1f", 31), ("9223372036854775807", 2**63 - 1), ("-9223372036854775808", -(2**63))],
    ],
)
def test_words_and_integers(text, expected):
    assert value(text) == expected
    assert type(value(text)) is type(expected)


@pytest.mark.parametrize("text", ["1e-5", "1e-06", "1.0", "1.", ".5", "-2.5E+3", "0.10", "6.02e23", "1e5"])
def test_floats_keep_how_they_were_written(text):
    number = value(text)
    assert isinstance(number, Float)
    assert number == float(text)
    assert number.text == text


@pytest.mark.parametrize("text", ["no", "yes", "on", "off", "y", "NO", "tRue", "nULL", "12:30", "1_000", "0755", "00"])
@pytest.mark.parametrize("quoted", ["{}", "'{}'", '"{}"'])
def test_what_older_yaml_converts_is_text(text, quoted):
    assert value(quoted.format(text)) == text


@pytest.mark.parametrize("text", ["2001-12-14", "0o8", "0xg", "1.2.3", "1e", "e5", ".", "+", "-1-", "0b1", "=", "1/2"])
def test_other_plain_scalars_are_text(text):
    assert value(text) == text


@pytest.mark.parametrize("text", [".inf", "-.Inf", "+.INF", ".nan", ".NaN", "1e999", "-1e999"])
@pytest.mark.parametrize("form", ["a: {}", "a: [{}]", "a: {{b: {}}}"])
def test_numbers_are_finite(text, form):
    assert [item.code for item in problems(form.format(text))] == ["SPEC027"]


@pytest.mark.parametrize("text", [str(2**63), str(-(2**63) - 1), "9" * 50_000, "0x" + "f" * 17, "0o" + "7" * 30])
def test_integers_fit_64_bits(text):
    (problem,) = problems(f"a: {text}")
    assert problem.code == "SPEC027"
    assert len(problem.message) < 150


@settings(deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_reads_back(number):
    assert value(repr(number)) == number
    assert math.copysign(1, value(repr(number))) == math.copysign(1, number)


def test_keys_are_text_whatever_they_look_like():
    assert load("1: a\ntrue: b\nno: c\n~: d\n1e5: e\n", "x").data == {
        "1": "a",
        "true": "b",
        "no": "c",
        "~": "d",
        "1e5": "e",
    }


# ---------------------------------------------------------------- positions


TEXT = """\
# a comment
name: gemma   # another

attention:
  full: {heads: 8, rope: none,
         scale: 1.0, why: "it's, quoted"}
ropes:
  - {all: full}
  - [a, 'b']
note: |
  two
  lines

last: >-
  folded
  text
"""


@pytest.mark.parametrize(
    ("path", "key", "span", "source"),
    [
        (("name",), (2, 1, 2, 5), (2, 7, 2, 12), "gemma"),
        (("attention",), (4, 1, 4, 10), (5, 3, 6, 42), None),
        (("attention", "full"), (5, 3, 5, 7), (5, 9, 6, 42), None),
        (("attention", "full", "scale"), (6, 10, 6, 15), (6, 17, 6, 20), "1.0"),
        (("attention", "full", "why"), (6, 22, 6, 25), (6, 27, 6, 41), '"it\'s, quoted"'),
        (("ropes",), (7, 1, 7, 6), (8, 3, 9, 13), None),
        (("ropes", 0), (8, 5, 8, 16), (8, 5, 8, 16), "{all: full}"),
        (("ropes", 1, 1), (9, 9, 9, 12), (9, 9, 9, 12), "'b'"),
        (("note",), (10, 1, 10, 5), (10, 7, 12, 8), "|\n  two\n  lines"),
        (("last",), (14, 1, 14, 5), (14, 7, 16, 7), ">-\n  folded\n  text"),
    ],
)
def test_positions(path, key, span, source):
    document = load(TEXT, "x.yaml")
    assert document.key_span(path) == Span(*key)
    assert document.value_span(path) == Span(*span)
    if source is not None:
        assert document.source(path) == source


def test_the_root_stands_at_the_beginning():
    document = load(TEXT, "x.yaml")
    assert document.key_span(()) == Span(1, 1, 1, 1)
    assert document.value_span(()) == Span(2, 1, 16, 7)


def test_part_of_a_text():
    document = load("a: x + y\nb: 'x + y'\nc: \"x \\x2b y\"\nd: x +\n  y\ne: 2.50\n", "x")
    assert document.part_span(("a",), 4, 5) == Span(1, 8, 1, 9)
    assert document.part_span(("b",), 4, 5) == Span(2, 9, 2, 10)
    assert document.part_span(("c",), 4, 5) == document.value_span(("c",))
    assert document.part_span(("d",), 4, 5) == document.value_span(("d",))
    assert document.part_span(("e",), 2, 4) == Span(6, 6, 6, 8)


NAMES = st.text("abcdefgh_", min_size=1, max_size=6)
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text("ab ,:#{}[]'\"&*!-é世\n", max_size=8)
TREES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=12
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(NAMES, TREES, min_size=1, max_size=4), st.sampled_from([True, False, None]))
def test_what_is_dumped_is_loaded_and_every_place_holds_its_value(data, flow):
    text = yaml.safe_dump(data, default_flow_style=flow, allow_unicode=True, width=60)
    document = load(text, "x.yaml")
    assert document.data == data
    for path, node in paths(data):
        span = document.value_span(path)
        assert document.data_at(path) == node
        assert (span.line, span.column) <= (span.end_line, span.end_column)
        if path:
            assert document.value_span(path[:-1]).contains(span)
        if isinstance(node, int | bool) and node is not None:
            assert load(f"a: {document.source(path)}", "x").data["a"] == node
        if path and isinstance(path[-1], str):
            key = document.key_span(path)
            assert document.lines[key.line - 1][key.column - 1 : key.end_column - 1].strip("'\"") == path[-1]


def paths(node, path=()):
    yield path, node
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for step, child in children:
        yield from paths(child, (*path, step))


@pytest.mark.parametrize("form", ["\r\n", "\r"])
@pytest.mark.parametrize("bom", ["", "\ufeff"])
def test_line_ends_and_byte_order_marks_change_nothing(form, bom):
    plain = load(TEXT, "x.yaml")
    assert load(bom + TEXT.replace("\n", form), "x.yaml") == plain
    assert load((bom + TEXT.replace("\n", form)).encode(), "x.yaml") == plain


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: &b 1", [("SPEC002", 1, 4)]),
        ("a: *b", [("SPEC002", 1, 4)]),
        ("a: &b {c: &d 1}\ne: *b", [("SPEC002", 1, 4), ("SPEC002", 1, 11), ("SPEC002", 2, 4)]),
        ("&a b: 1", [("SPEC002", 1, 1)]),
        ("a: 1\n<<: {b: 1}", [("SPEC002", 2, 1)]),
        ("a: {<<: *b}", [("SPEC002", 1, 5), ("SPEC002", 1, 9)]),
        ("a: !!str 1", [("SPEC002", 1, 4)]),
        ("a: ! 1", [("SPEC002", 1, 4)]),
        ("a: !!python/object:os.system {}", [("SPEC002", 1, 4)]),
        ("a: !x!y 1", [("SPEC002", 1, 4)]),
        ("a: !<x", [("SPEC002", 1, 7)]),
        ("%YAML 1.1\n---\na: 1", [("SPEC002", 1, 1)]),
        ("# x\n%YAML 1.2\n---\na: 1", [("SPEC002", 2, 1)]),
        ("%YAML 99.9\n---\na: 1", [("SPEC002", 1, 1)]),
        ("%TAG ! tag:x\n---\na: 1", [("SPEC002", 1, 1)]),
        ("a: 1\n---\nb: 2", [("SPEC002", 2, 1)]),
        ("a:\tb", [("SPEC002", 1, 3)]),
        ("a:\n\tb: 1\n\tc: 2", [("SPEC002", 2, 1)]),
        ("a: 1 #\tx", [("SPEC002", 1, 7)]),
        ("a: b\u2028c", [("SPEC002", 1, 5)]),
        ("a: b\x85c", [("SPEC002", 1, 5)]),
        ("a: \x00", [("SPEC002", 1, 4)]),
        ("a: b\u202ec", [("SPEC002", 1, 5)]),
        ("a: \ud800", [("SPEC002", 1, 4)]),
        ('a: "\\e"', [("SPEC002", 1, 4)]),
        ('a: "\\ud800"', [("SPEC002", 1, 4)]),
        ('a: "\\UFFFFFFFF"', [("SPEC001", 1, 7)]),
        ("[a]: b", [("SPEC002", 1, 1)]),
        ("? {a: b}\n: c", [("SPEC002", 1, 3)]),
        ("{" * 1000, [("SPEC002", 1, 2)]),
        ("a: 1\nb: 2\na: 3", [("SPEC003", 3, 1)]),
        ("a: {b: 1, 'b': 2, \"b\": 3}", [("SPEC003", 1, 11), ("SPEC003", 1, 19)]),
        ("", [("SPEC028", 1, 1)]),
        ("# only a comment\n", [("SPEC028", 1, 1)]),
        ("---\n...\n", [("SPEC028", 1, 1)]),
        ("null", [("SPEC028", 1, 1)]),
        ("- a", [("SPEC028", 1, 1)]),
        ("text", [("SPEC028", 1, 1)]),
        (b"a: 1\nb: \xff", [("SPEC028", 2, 4)]),
        ("a: 1".encode("utf-16"), [("SPEC028", 1, 1)]),
        ("[" * 200_000, [("SPEC028", 1, MAX_DEPTH + 1)]),
        ("- " * 200_000, [("SPEC028", 1, 2 * MAX_DEPTH + 1)]),
        ("a: b: c", [("SPEC001", 1, 5)]),
        ("a: [1, 2\nb: 1", [("SPEC001", 2, 2)]),
        ("a: 'b\nc: d", [("SPEC001", 1, 4)]),
        ("a: @b", [("SPEC001", 1, 4)]),
        ("a: %b", [("SPEC001", 1, 4)]),
        ("a: b\nc", [("SPEC001", 2, 1)]),
        ("a: {b: 1}}", [("SPEC001", 1, 10)]),
        ("  a: 1\n b: 2", [("SPEC001", 2, 2)]),
        ('a: "\\q"', [("SPEC001", 1, 6)]),
        ("a: |x\n  b", [("SPEC001", 1, 5)]),
        ("a: - b", [("SPEC001", 1, 4)]),
        ('"": 1', [("SPEC001", 1, 1)]),
    ],
)
def test_refused(text, expected):
    assert places(text) == expected
    for item in problems(text):
        assert item.help
        assert item.path == "x.yaml"
    assert "YAMLError" not in render_text(problems(text), {"x.yaml": split_lines(text)})


def test_all_problems_are_found_in_one_run():
    text = "a: &x 1\nb: .inf\nb: {c: d, e}\nf: !!int 3\ng: 99999999999999999999\n---\nh: 1"
    assert [code for code, _, _ in places(text)] == [
        "SPEC002",
        "SPEC027",
        "SPEC003",
        "SPEC026",
        "SPEC002",
        "SPEC027",
        "SPEC002",
    ]


def test_a_duplicate_points_at_the_first():
    (problem,) = problems("a:\n  b: 1\n  b: 2")
    assert problem.notes[0].message == "first defined here"
    assert problem.notes[0].span == Span(2, 3, 2, 4)


def test_size_limit():
    at_limit = "a: 1\n#" + " " * (MAX_BYTES - 6)
    assert load(at_limit, "x").data == {"a": 1}
    assert places(at_limit + " ") == [("SPEC028", 1, 1)]
    assert places(("a: " + "é" * (MAX_BYTES // 2)).encode()) == [("SPEC028", 1, 1)]


def test_depth_limit():
    assert load("a: " + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1), "x")
    assert places("a: " + "[" * MAX_DEPTH + "]" * MAX_DEPTH) == [("SPEC028", 1, MAX_DEPTH + 3)]


# ---------------------------------------------------------------- text that a comma ended


def test_a_comma_that_ended_the_text():
    (problem,) = problems("a: {kind: rms, why: the mean, not the variance, really, eps: eps}")
    assert problem.code == "SPEC026"
    assert problem.span == Span(1, 31, 1, 47)
    assert problem.message == "a comma ended the text of `why`, so `not the variance` is a key without a value"
    assert '`why: "the mean, not the variance, really"`' in problem.help


@pytest.mark.parametrize(
    ("text", "help"),
    [
        ("a: {b:1}", "put a blank after the `:`: `b: 1`"),
        ("a: {b}", "between braces, write `key: value`"),
        ("a: {b: 1, c:}", "write `c: none`, or `null` in a config"),
        ("a: {b: , c: 1}", "write `b: none`, or `null` in a config"),
        ("a: {b: x, c, d: y, e}", None),
    ],
)
def test_a_key_without_value_between_braces(text, help):
    found = problems(text)
    assert {item.code for item in found} == {"SPEC026"}
    assert len(found) == (1 if help else 2)
    if help:
        assert found[0].help == help


def test_an_explicit_null_between_braces_is_a_value():
    assert value("{b: null, c: ~}") == {"b": None, "c": None}


# ---------------------------------------------------------------- hostile input


@settings(max_examples=300, deadline=None)
@given(st.text("ab:,{}[]&*!|>'\"%@`?-#\n \t\\x0.~<=", max_size=60) | st.text(max_size=30) | st.binary(max_size=30))
def test_anything_is_read_or_refused(text):
    try:
        document = load(text, "x.yaml")
    except SpecError as error:
        shown = render_text(error.diagnostics, {"x.yaml": split_lines(text)})
        assert shown.startswith("error[SPEC")
        shown.encode()
    else:
        assert isinstance(document.data, dict)
        for path, _ in paths(document.data):
            document.source(path)


@pytest.mark.parametrize(
    "text", ["a: 1\n" * 3000, "a: [" + "&x b, " * 3000 + "]", "a: {" + "b, c, " * 3000 + "}", "\t\n" * 9000]
)
def test_many_mistakes_take_no_long_time(text):
    assert problems(text)


FILE_CODES = ["SPEC001", "SPEC002", "SPEC003", "SPEC026", "SPEC027", "SPEC028"]


@pytest.mark.parametrize("code", FILE_CODES)
def test_the_catalogue_shows_the_mistake_that_it_names(code):
    assert {item.code for item in problems(CODES[code].bad)} == {code}


@pytest.mark.parametrize("code", CODES)
def test_examples_of_the_catalogue_are_yaml(code):
    assert load(CODES[code].good, "good.yaml").data
    if code not in FILE_CODES:
        assert load(CODES[code].bad, "bad.yaml").data
