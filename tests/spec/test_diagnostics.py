"""How mistakes are shown: text to the character, JSON, suggestions, one message a mistake."""

import json
import subprocess
import sys
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen.errors import FlexgenError
from flexgen.spec.codes import CODES, Stage
from flexgen.spec.diagnostics import (
    Diagnostic,
    Note,
    Span,
    SpecError,
    merge_cascades,
    nearest,
    render_json,
    render_text,
)
from flexgen.spec.snippet import MAX_COLUMNS, excerpt

PATH = "specs/gemma4_moe.yaml"


def diagnostic(code="SPEC004", message="unknown field `windw`", span=(1, 1, 1, 2), path=PATH, **more):
    return Diagnostic(code, message, path, Span(*span), **more)


def shown(*diagnostics, lines):
    return render_text(diagnostics, {PATH: lines})


# ---------------------------------------------------------------- text


def test_text_with_a_caret_under_the_range():
    line = "  sliding: {heads: heads, kv_heads: kv_heads, head_dim: head_dim, rope: sliding, windw: window, scale: 1.0}"
    item = diagnostic(span=(38, 82, 38, 87), help="did you mean `window`?")
    assert shown(item, lines=[""] * 37 + [line]) == (
        "error[SPEC004]: unknown field `windw`\n"
        "  --> specs/gemma4_moe.yaml:38:82\n"
        "   |\n"
        f"38 | {line}\n"
        "   |                                                                                  ^^^^^\n"
        "   = help: did you mean `window`?\n"
    )


def test_gutters_of_notes_are_aligned():
    first = Note("first defined here", PATH, Span(7, 1, 7, 3))
    item = diagnostic(
        "SPEC003", "`ab` is defined twice", (100, 1, 100, 3), help="one\ntwo", notes=[first, Note("so it is")]
    )
    assert shown(item, lines=["ab: 1"] * 100) == (
        "error[SPEC003]: `ab` is defined twice\n"
        "   --> specs/gemma4_moe.yaml:100:1\n"
        "    |\n"
        "100 | ab: 1\n"
        "    | ^^\n"
        "    = help: one\n"
        "            two\n"
        "note: first defined here\n"
        "   --> specs/gemma4_moe.yaml:7:1\n"
        "    |\n"
        "  7 | ab: 1\n"
        "    | ^^\n"
        "    = note: so it is\n"
    )


def test_diagnostics_are_separated_by_a_blank_line_and_keep_their_order():
    text = shown(diagnostic(message="b"), diagnostic(message="a"), lines=["x"])
    assert [block.splitlines()[0] for block in text.split("\n\n")] == ["error[SPEC004]: b", "error[SPEC004]: a"]


def test_a_range_over_several_lines_is_marked_on_its_first():
    assert shown(diagnostic(span=(1, 4, 3, 2)), lines=["a: [b,", "  c", "]"]).splitlines()[3:] == [
        "1 | a: [b,",
        "  |    ^^^",
    ]


def test_an_empty_range_has_one_caret_and_a_place_without_source_none():
    assert shown(diagnostic(span=(1, 3, 1, 3)), lines=["a:"]).splitlines()[-1] == "  |   ^"
    assert render_text([diagnostic(span=(9, 3, 9, 4))], {PATH: ["a"]}).splitlines()[1:] == [
        " --> specs/gemma4_moe.yaml:9:3"
    ]
    assert render_text([diagnostic(span=(9, 3, 9, 4))], {}).splitlines()[1:] == [" --> specs/gemma4_moe.yaml:9:3"]


def test_nothing_that_a_terminal_acts_on_is_shown():
    item = diagnostic(message="field `\x1b[31m\n`", help="\x07", path=PATH)
    text = shown(item, lines=["\x1b[31m\u202e\x00\r"])
    assert text.replace("\n", "").isprintable()
    assert "field `\\x1b[31m\\n`" in text


# ---------------------------------------------------------------- excerpts


def width(text):
    cells = [
        0 if unicodedata.category(c) in ("Mn", "Me") else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text
    ]
    return sum(cells)


@pytest.mark.parametrize(
    ("line", "start", "end", "carets"),
    [
        ("abc", 1, 2, " ^"),
        ("世界: x", 4, 5, "      ^"),
        ("世界: x", 0, 2, "^^^^"),
        ("e\u0301: x", 4, 5, "   ^"),
        ("e\u0301: x", 0, 2, "^"),
        ("\tx", 1, 2, " ^"),
        ("ab", 2, 2, "  ^"),
        ("ab", 9, 12, "  ^"),
    ],
)
def test_carets_stand_under_their_characters(line, start, end, carets):
    assert excerpt(line, start, end)[1] == carets


def test_a_line_of_140_columns_is_whole_and_a_longer_one_is_cut_around_the_carets():
    line = "x" * MAX_COLUMNS
    assert excerpt(line, 3, 4)[0] == line
    text, carets = excerpt("a" * 200 + "BAD" + "c" * 200, 200, 203)
    assert text == "…" + "a" * 67 + "BAD" + "c" * 68 + "…"
    assert carets == " " * 68 + "^^^"
    assert excerpt("BAD" + "c" * 200, 0, 3) == ("BAD" + "c" * 136 + "…", "^^^")
    assert excerpt("c" * 200 + "BAD", 200, 203) == ("…" + "c" * 136 + "BAD", " " * 137 + "^^^")


LINES = st.text("ab: 世é\u0301\t,", max_size=400)


@settings(deadline=None)
@given(LINES, st.data())
def test_the_carets_mark_the_range(line, data):
    start = data.draw(st.integers(0, len(line)))
    end = data.draw(st.integers(start, len(line)))
    text, carets = excerpt(line, start, end)
    first = carets.index("^")
    assert width(text) <= MAX_COLUMNS
    assert len(carets) <= MAX_COLUMNS + 1
    if width(line) <= MAX_COLUMNS:
        assert text == line.replace("\t", " ")
        assert first == width(line[:start])
        assert carets.count("^") == max(1, width(line[start:end]))


@settings(deadline=None)
@given(st.integers(0, 600), st.integers(1, 300), st.integers(0, 600))
def test_a_window_shows_the_range_from_its_first_character(before, length, after):
    text, carets = excerpt("." * before + "X" * length + "." * after, before, before + length)
    first, marked = carets.index("^"), carets.count("^")
    assert text[first : first + marked] == "X" * marked
    assert first == 0 or text[first - 1] in ".…"
    assert marked == length or (text.endswith("X…") and marked > MAX_COLUMNS // 2)


# ---------------------------------------------------------------- JSON


def test_json():
    item = diagnostic(span=(38, 82, 38, 87), help="h", notes=[Note("n", "b.yaml", Span(1, 2, 3, 4)), Note("m")])
    assert json.loads(render_json([item])) == {
        "version": 1,
        "diagnostics": [
            {
                "file": PATH,
                "range": {"start": {"line": 38, "column": 82}, "end": {"line": 38, "column": 87}},
                "code": "SPEC004",
                "message": "unknown field `windw`",
                "help": "h",
                "notes": [
                    {
                        "message": "n",
                        "file": "b.yaml",
                        "range": {"start": {"line": 1, "column": 2}, "end": {"line": 3, "column": 4}},
                    },
                    {"message": "m", "file": None, "range": None},
                ],
            }
        ],
    }
    assert json.loads(render_json([])) == {"version": 1, "diagnostics": []}


# ---------------------------------------------------------------- the error


def test_a_spec_error_holds_everything_sorted():
    items = [
        diagnostic(message="c", span=(2, 1, 2, 2)),
        diagnostic(message="b", span=(1, 9, 1, 10)),
        diagnostic(message="a", path="a.yaml"),
    ]
    error = SpecError(items)
    assert isinstance(error, FlexgenError)
    assert [item.message for item in error.diagnostics] == ["a", "b", "c"]
    assert str(error).splitlines()[0] == "a.yaml:1:1: error[SPEC004]: a"


# ---------------------------------------------------------------- one message a mistake


def messages(*diagnostics):
    return [item.message for item in merge_cascades(diagnostics)]


def test_equal_diagnostics_are_one():
    assert messages(diagnostic(notes=[Note("n")]), diagnostic(notes=(Note("n"),))) == ["unknown field `windw`"]


def test_a_misspelled_field_settles_that_the_right_one_is_missing():
    typo = diagnostic(message="typo", span=(3, 9, 3, 14), settles=[("mlp", "dense", "size")])
    missing = diagnostic("SPEC005", "missing", (3, 3, 3, 8), subject=("mlp", "dense", "size"))
    other = diagnostic("SPEC005", "other", (4, 3, 4, 8), subject=("mlp", "wide", "size"))
    assert messages(missing, other, typo) == ["typo", "other"]


def test_a_settled_entry_settles_its_fields():
    typo = diagnostic(message="typo", span=(3, 9, 3, 14), settles=[("mlp", "dense")])
    assert messages(typo, diagnostic("SPEC005", "inner", (9, 1, 9, 2), subject=("mlp", "dense", "size"))) == ["typo"]


def test_a_later_stage_at_around_or_inside_an_earlier_mistake_is_a_consequence():
    name = diagnostic("SPEC008", "name", (5, 10, 5, 20))
    around = diagnostic("SPEC017", "around", (4, 1, 6, 9))
    inside = diagnostic("SPEC010", "inside", (5, 12, 5, 14))
    beside = diagnostic("SPEC010", "beside", (5, 21, 5, 24))
    elsewhere = diagnostic("SPEC017", "elsewhere", (4, 1, 6, 9), path="z.yaml")
    assert messages(around, inside, beside, name, elsewhere) == ["name", "beside", "elsewhere"]


def test_mistakes_of_one_stage_at_one_place_are_all_told():
    assert messages(diagnostic("SPEC005", "a"), diagnostic("SPEC005", "b"), diagnostic("SPEC004", "c")) == [
        "c",
        "a",
        "b",
    ]


def test_an_unknown_name_in_many_places_is_one_message():
    (item,) = merge_cascades(diagnostic("SPEC012", "unknown name `hiden`", (line, 5, line, 10)) for line in range(1, 8))
    assert item.span.line == 1
    assert [note.span and note.span.line for note in item.notes] == [2, 3, 4, None]
    assert item.notes[-1].message == "and in 3 more places"


def test_a_missing_field_in_many_places_stays_many():
    assert (
        len(merge_cascades(diagnostic("SPEC005", "missing `size`", (line, 5, line, 10)) for line in range(1, 8))) == 7
    )


@settings(deadline=None)
@given(st.permutations([diagnostic(code, code, (line, 1, line, 5)) for line, code in enumerate(CODES, 1)]))
def test_the_order_given_does_not_matter(diagnostics):
    assert [item.span.line for item in merge_cascades(diagnostics)] == list(range(1, len(CODES) + 1))


# ---------------------------------------------------------------- did you mean


@pytest.mark.parametrize(
    ("name", "candidates", "expected"),
    [
        ("windw", ["window", "why", "wide"], "window"),
        ("slidign", ["sliding", "full"], "sliding"),
        ("Sliding", ["sliding", "full"], "sliding"),
        ("kv-heads", ["kv_heads", "heads"], "kv_heads"),
        ("normalize", ["normalise", "norm"], "normalise"),
        ("sliding_window", ["window", "rope"], "window"),
        ("size", ["expert_size", "vocab_size"], None),
        ("rms", ["layer", "rope"], None),
        ("q", ["k", "v"], None),
        ("x", [], None),
        ("window", ["window"], None),
        ("full_attention", ["linear_attention", "sliding"], None),
        ("a" * 10**6, ["a", "b"], None),
    ],
)
def test_nearest(name, candidates, expected):
    assert nearest(name, candidates) == expected


@settings(deadline=None)
@given(st.text("abcdefgh_", min_size=4, max_size=12), st.data())
def test_one_slip_is_always_found(name, data):
    at = data.draw(st.integers(0, len(name) - 1))
    slip = data.draw(
        st.sampled_from([name[:at] + name[at + 1 :], name[:at] + "z" + name[at:], name[:at] + "z" + name[at + 1 :]])
    )
    assert nearest(slip, [name, "completely_other_words", "zz"]) == name


@settings(deadline=None)
@given(st.lists(st.text("abc_", max_size=6), max_size=8), st.text("abc_", max_size=6))
def test_the_suggestion_is_a_candidate_and_does_not_depend_on_their_order(candidates, name):
    found = nearest(name, candidates)
    assert found is None or (found in candidates and found != name)
    assert nearest(name, reversed(candidates)) == found


# ---------------------------------------------------------------- the catalogue


def test_codes_are_stable_and_complete():
    assert list(CODES) == [f"SPEC{number:03}" for number in range(1, len(CODES) + 1)]
    assert CODES["SPEC004"].title == "unknown field"
    assert CODES["SPEC010"].title == "a field that has no effect"
    assert {entry.stage for entry in CODES.values()} == set(Stage)


@pytest.mark.parametrize("code", CODES)
def test_explain(code):
    entry = CODES[code]
    text = entry.explain()
    assert text.startswith(f"{code}: {entry.title}\n\n")
    assert "Wrong:\n\n    " in text and "Right:\n\n    " in text
    assert entry.bad != entry.good
    assert max(map(len, text.splitlines())) <= 110
    assert not any(word in text.lower() for word in ("pydantic", "jinja", "traceback"))


def test_a_code_that_is_not_in_the_catalogue_is_our_bug():
    with pytest.raises(AssertionError):
        diagnostic("SPEC999")


def test_reading_a_spec_imports_nothing_heavy():
    modules = "flexgen.spec.source, flexgen.spec.diagnostics, flexgen.spec.expressions"
    heavy = ("torch", "transformers", "jinja2", "numpy", "pydantic")
    program = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"
