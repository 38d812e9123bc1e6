"""A spec is data: whatever it holds, it runs nothing, writes nowhere else, and makes code that compiles or a diagnostic."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexgen.assets import root
from flexgen.ir.resolve import resolve
from flexgen.render.render import render
from flexgen.spec.codes import CODES
from flexgen.spec.diagnostics import SpecError, render_text
from flexgen.spec.load import parse_spec
from flexgen.spec.source import MAX_BYTES, split_lines

LLAMA = (root("specs") / "llama.yaml").read_text()
TEXTS = [path.read_text() for path in sorted(root("specs").glob("*.yaml"))]
WORDS = sorted({word for text in TEXTS for word in text.split()})
EVIL = {"__import__", "eval", "exec", "open", "os", "system", "subprocess", "globals", "breakpoint", "compile"}
CODE = "__import__('os').system('touch pwned')"


def outcome(text: bytes | str) -> tuple[str, ...]:
    """The codes of the diagnostics; none where the spec builds, to code that compiles and calls nothing of EVIL."""
    try:
        files = render(resolve(parse_spec(text, "spec.yaml")))
    except SpecError as error:
        lines = split_lines(text)
        for item in error.diagnostics:
            for span in (item.span, *(note.span for note in item.notes if note.span)):
                assert 1 <= span.line <= len(lines) and 1 <= span.column <= len(lines[span.line - 1]) + 2, item
                assert (span.line, span.column) <= (span.end_line, span.end_column)
        assert render_text(error.diagnostics, {"spec.yaml": lines})
        assert {item.code for item in error.diagnostics} <= set(CODES)
        return tuple(item.code for item in error.diagnostics)
    for name, code in files.items():
        if name.endswith(".py"):
            tree = ast.parse(code)
            compile(tree, name, "exec")
            assert not {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & EVIL
    return ()


NAMES = [
    "../../etc/evil", "/tmp/evil", ".hidden", "a/b", "a b", "a-b", "A", "_a", "__class__", "__init__", "class", "lambda", "None",
    "import", CODE, "f'{1}'", "x;y", "x\\ny", "é", "ﬁ", "a" * 41, "a" * 100_000, "",
]  # fmt: skip


PLACES = ["name: llama", "  rms: {kind", "  rope: {par", "  size: inter", "  mlp: {size", "  full: {heads", "  full: {att"]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name[:20] or "empty")
@pytest.mark.parametrize("place", PLACES)
def test_a_name_that_is_none_is_refused(place, name):
    before, key = place[: len(place) - len(place.lstrip())], place.strip().split(":")[0]
    hostile = f'name: "{name}"' if key == "name" else f'{before}"{name}":{place.strip()[len(key) + 1 :]}'
    codes = outcome(LLAMA.replace(place, hostile, 1))
    assert set(codes) & {"SPEC020", "SPEC007", "SPEC001", "SPEC002"}


TENSORS = ['a"b', "a'b", "a{i}b", "a\\nb", "a\\\\b", "a b", "a..b", ".a", "é", "a*b", "(a)", "a;b", CODE, "a" * 201]


@pytest.mark.parametrize("name", TENSORS, ids=lambda name: name[:20])
@pytest.mark.parametrize("weight", ["input_layernorm", "embed_tokens", "lm_head"])
def test_a_tensor_name_that_is_none_is_refused(weight, name):
    quoted = '"' + name.replace('"', '\\"') + '"'
    assert set(outcome(LLAMA.replace(f"weight: {weight}", f"weight: {quoted}", 1))) <= {"SPEC021", "SPEC007"}
    assert outcome(LLAMA.replace(f"weight: {weight}", f"weight: {quoted}", 1))


PAYLOADS = [
    '\\"\\"\\"\\n' + CODE + '\\n\\"\\"\\"',
    "\\\\", '\\"', '\\"\\"\\"', "\\n" + CODE, "{{ 7 * 7 }}", "{% raw %}", "\\u2028" + CODE, "# " + CODE, "'" * 3,
]  # fmt: skip


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize(
    ("place", "hostile"),
    [
        ('summary: "Llama and its relatives: pre-norm, rotary attention, gated MLP."', 'summary: "{}"'),
        ("{norm: rms, weight: input_layernorm}", '{{norm: rms, weight: input_layernorm, why: "{}"}}'),
        ("{all: true, kind: full}", '{{all: true, kind: full, why: "{}"}}'),
        ("model_types: [llama]", 'model_types: [llama, "{}"]'),
        ("hidden_act: silu\n    rope", 'hidden_act: "{}"\n    rope'),
        ("require: {hidden_act: silu}", 'require: {{hidden_act: [silu, "{}"]}}'),
        ("rms_norm_eps: 1e-6", 'rms_norm_eps: 1e-6\n    "{}": 1'),
    ],
)
def test_text_stays_text(place, hostile, payload):
    assert place in LLAMA
    codes = outcome(LLAMA.replace(place, hostile.format(payload), 1))
    assert set(codes) <= {"SPEC002", "SPEC010", "SPEC023", "SPEC024"}


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_value_of_the_schedule_stays_text(payload):
    text = (root("specs") / "gpt_oss.yaml").read_text()
    text = text.replace("sliding_attention: sliding,", f'"{payload}": sliding,')
    layer = f'"{payload}"'
    text = text.replace("[sliding_attention, full_attention, sliding_attention, full_attention]", f"[{layer}, full_attention]")
    assert set(outcome(text.replace("num_hidden_layers: 4", "num_hidden_layers: 2"))) <= {"SPEC002"}


EXPRESSIONS = [
    CODE, "().__class__", "hidden.__class__", "hidden.__len__", "lambda: 1", "[1]", "{1}", "hidden ** 9 ** 9", "9" * 30, "1e999",
    "(" * 500 + "1" + ")" * 500, "-" * 500 + "1", "1" + " + 1" * 5000, "hidden if 1 else 2", "f''", "hidden // 0", "hidden; 1", "\\x00",
]  # fmt: skip


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=lambda text: text[:20])
@pytest.mark.parametrize("place", ["size: intermediate_size", "size: size, act", "head_dim or hidden // heads"])
def test_an_expression_that_is_none_is_refused(place, expression):
    good = place.split(", act")[0].removeprefix("size: ")
    assert outcome(LLAMA.replace(place, place.replace(good, f'"{expression}"', 1), 1))


FILES = {
    "nothing": b"",
    "nul": LLAMA.replace("llama", "ll\x00ama").encode(),
    "not UTF-8": LLAMA.encode() + b"# \xff\n",
    "a byte too many": b"# " + b"x" * (MAX_BYTES - 1),
    "laughs": ("a: &a [x,x]\n" + "".join(f"b{n}: &b{n} [{','.join(['*a'] * 9)}]\n" for n in range(9)) + LLAMA).encode(),
    "deep lists": (LLAMA + "  x: " + "[" * 2000 + "]" * 2000 + "\n").encode(),
    "deep mappings": (LLAMA + "  x: " + "{a: " * 2000 + "1" + "}" * 2000 + "\n").encode(),
    "deep blocks": (LLAMA + "".join(" " * (2 + n) + "x:\n" for n in range(500))).encode(),
    "python objects": b"!!python/object/apply:os.system ['touch pwned']\n",
    "many dims": LLAMA.replace("dims:\n", "dims:\n" + "".join(f"  d{n}: hidden_size\n" for n in range(20_000))).encode(),
    "many kinds": LLAMA.replace("kinds:\n", "kinds:\n" + "".join(f"  k{n}: {{attention: full}}\n" for n in range(20_000))).encode(),
    "many names": LLAMA.replace("[pretraining_tp]", str([f"f{n}" for n in range(50_000)])).encode(),
    "one long line": LLAMA.replace("silu}", "silu" + "u" * 900_000 + "}", 1).encode(),
    "huge number": LLAMA.replace("vocab_size: 211", "vocab_size: " + "9" * 100_000).encode(),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_spec_is_refused(name):
    codes = outcome(FILES[name])
    assert codes or name == "many names"


def test_nothing_is_written_outside_of_the_output_folder(tmp_path):
    spec, out = tmp_path / "evil.yaml", tmp_path / "out"
    for name in ("../evil", "/tmp/evil", "..", "a/../../evil", CODE):
        spec.write_text(LLAMA.replace("name: llama", f"name: {name!r}" if "'" not in name else f'name: "{name}"'))
        command = [sys.executable, "-m", "flexgen", "build", str(spec), "--out", str(out)]
        done = subprocess.run(command, cwd=root("specs").parent, capture_output=True, text=True)
        assert done.returncode == 3, done
        assert "SPEC020" in done.stderr and "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["evil.yaml"]


# ---------------------------------------------------------------- random edits

PIECES = st.one_of(
    st.sampled_from([*"{}[]:,-#&*!|>'\"%@`\\\n \t0", ": ", "- ", "  ", "\n\n", "~", "null", "none", "like", "<<: ", "\ufeff", "\r\n"]),
    st.sampled_from(WORDS),
    st.text(max_size=4),
)


@st.composite
def edited(draw) -> str:
    text = draw(st.sampled_from(TEXTS))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        match draw(st.integers(0, 4)):
            case 0:
                text = text[:at] + draw(PIECES) + text[at:]
            case 1:
                text = text[:at] + text[at + draw(st.integers(1, 30)) :]
            case 2:
                text = text[:at] + draw(PIECES) + text[at + draw(st.integers(1, 8)) :]
            case 3:
                lines = text.split("\n")
                i, j = (draw(st.integers(0, len(lines) - 1)) for _ in "ij")
                lines[i], lines[j] = lines[j], lines[i]
                text = "\n".join(lines)
            case 4:
                old, new = draw(st.sampled_from(sorted(set(text.split())) or [" "])), draw(st.sampled_from(WORDS))
                text = text.replace(old, new)
    return text


@given(edited())
@settings(max_examples=250, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_random_edits_end_in_code_or_in_diagnostics(text):
    outcome(text)
