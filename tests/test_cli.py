"""Exit codes, and messages: 0 fine, 1 differs, 2 usage, 3 invalid input, 4 failure, 130 interrupted; never a traceback."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import saved
from typer.main import get_command

from flexgen import cli
from flexgen.assets import root
from flexgen.cli import shared

NEXT = "next: flexgen new NAME --config DIR, or a spec of your own in specs/\n"
LLAMA = (root("specs") / "llama.yaml").read_text("utf-8")


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a command line in this process. -> its exit code, and all that it printed"""

    def call(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["flexgen", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return int(ended.value.code or 0), printed.out + printed.err

    return call


@pytest.fixture
def broken(tmp_path) -> Path:
    path = tmp_path / "llama.yaml"
    path.write_text(LLAMA.replace("cast: before", "cast: befor"), "utf-8")
    return path


def test_exit_codes(run, broken, tmp_path):
    for code, arguments in (
        (0, ("check", "llama")),
        (3, ("check", broken)),
        (3, ("check", broken, "--format", "json")),
        (3, ("build", broken, "--out", tmp_path)),
        (1, ("build", "llama", "--out", tmp_path, "--check")),
        (0, ("build", "llama", "--out", tmp_path)),
        (0, ("build", "llama", "--out", tmp_path, "--check")),
        (2, ("check", "nope")),
        (2, ("build", "--nonsense")),
        (2, ("verify", "nope")),
        (0, ("explain", "SPEC004")),
        (0, ("explain", "spec004")),
        (2, ("explain", "SPEC999")),
    ):
        assert run(*arguments)[0] == code, arguments


MESSAGES = {
    ("nope",): "error: No such command 'nope': see `flexgen --help`",
    ("check", "--format", "xml"): "error: Invalid value for '--format': 'xml' is not one of 'text', 'json': see `flexgen check --help`",
    ("check", "FOLDER"): "error: `FOLDER` is a folder: give the path of a file, or one of ",
    ("check", "x" * 5000): f"error: no spec `{'x' * 5000}`: give the path of a file, or one of ",
    ("build", "llama", "--out", "FILE"): "error: FILE is a file: give a folder as --out",
    ("build", "llama", "--out", "FILE/x"): "error: cannot use FILE/x: Not a directory",
    ("explain", "SPEC004", "attention"): "error: SPEC004 is a diagnostic, which has no places and no map: flexgen explain SPEC004",
    ("explain", "some/walker.py"): "error: some/walker.py is no spec: give one of its lines, as in some/walker.py:1",
    ("new", "class", "--from", "llama"): "error: `class` cannot name a spec: it is a word of Python",
    ("generate", "FOLDER", "-f", "LATIN"): "error: LATIN: byte 1 is not UTF-8: save the prompts as UTF-8",
    ("generate", "FOLDER", "-f", "FOLDER/nope"): "error: cannot use FOLDER/nope: No such file or directory",
}  # fmt: skip


@pytest.mark.parametrize("arguments", MESSAGES, ids=lambda a: " ".join(a)[:40])
def test_a_message_says_what_is_wrong_and_what_to_do(run, tmp_path, arguments):
    files = {"FOLDER": tmp_path, "FILE": tmp_path / "file", "LATIN": tmp_path / "latin"}
    files["FILE"].write_text("")
    files["LATIN"].write_bytes(b"a\xff")

    def filled(text: str) -> str:
        for name, path in files.items():
            text = text.replace(name, str(path))
        return text

    code, printed = run(*map(filled, arguments))
    assert code in (2, 4)
    assert printed.startswith(filled(MESSAGES[arguments])), printed


def test_help_alone_is_no_error(run):
    code, printed = run()
    assert code == 2
    assert "error:" not in printed


def test_every_command_shows_where_a_spec_is_wrong(run, broken):
    for command in ("check", "build", "explain"):
        code, printed = run(command, broken)
        assert code == 3
        assert "error[SPEC007]" in printed, command
        assert "cast: befor" in printed, command


def test_mistakes_of_shape_come_first_and_those_of_meaning_once_it_is_right(run, tmp_path):
    """`eps` and a rope name nothing; a `cast` and a field are of the wrong shape."""
    spec = tmp_path / "x.yaml"
    right = LLAMA.replace("cast: before, eps: eps", "cast: before, eps: epz").replace("rope: rope,", "rope: roep,")
    wrong = right.replace("cast: before, eps: epz", "cast: befor, eps: epz, epsilon: 1")
    shape, meaning = ("`cast` cannot be `befor`", "unknown field `epsilon`"), ("unknown name `epz`", "unknown rope `roep`")
    for text, messages in ((wrong, shape), (right, meaning)):
        spec.write_text(text, "utf-8")
        code, printed = run("check", spec)
        assert code == 3 and printed.count("error[") == len(messages)
        assert all(printed.count(message) == 1 for message in messages)


def test_open_decisions_are_counted(run, tmp_path):
    spec = tmp_path / "llama.yaml"
    spec.write_text(LLAMA.replace("norms:", "# TODO decide: norms\nnorms:"), "utf-8")
    assert run("check", spec) == (0, "ok llama; decisions that are still marked `# TODO decide:`: 1\n")


def test_a_spec_with_the_name_of_its_neighbour_makes_no_package(run, tmp_path):
    for file in ("llama.yaml", "mine.yaml"):
        (tmp_path / file).write_text(LLAMA, "utf-8")
    code, printed = run("build", tmp_path / "mine.yaml", "--out", tmp_path / "out")
    assert code == 2 and "llama.yaml and" in printed and "are both called `llama`" in printed
    assert not (tmp_path / "out").exists()


def test_two_specs_of_one_name_make_no_package(run, tmp_path, monkeypatch):
    copy = tmp_path / "my copy.yaml"
    copy.write_text(LLAMA, "utf-8")
    code, printed = run("build", copy, "llama", "--out", tmp_path / "out")
    assert code == 2
    assert "are both called `llama`" in printed
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(shared, "find_specs", lambda _: [copy, root("specs") / "llama.yaml"])
    code, again = run("diff")
    assert (code, again) == (2, printed)
    monkeypatch.undo()
    assert run("build", "llama", root("specs") / "llama.yaml", "--out", tmp_path / "out")[0] == 0  # the same one twice


def test_the_command_that_mends_can_be_pasted(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my spec.yaml").write_text(LLAMA, "utf-8")
    _, printed = run("build", "my spec.yaml", "--out", "an out", "--check")
    assert "MISSING an out/llama/walker.py: flexgen build 'my spec.yaml' --out 'an out'\n" in printed


@pytest.mark.parametrize("manifest", ["[]", '{"files": [1]}', '{"files": {"../../kept": "x"}}', "\xff", "[" * 9000])
def test_a_manifest_that_is_none_is_replaced(run, tmp_path, manifest):
    package = tmp_path / "out" / "llama"
    package.mkdir(parents=True)
    (package / "manifest.json").write_text(manifest, "latin-1")
    (tmp_path / "kept").write_text("")
    assert run("build", "llama", "--out", tmp_path / "out")[0] == 0
    assert run("build", "llama", "--out", tmp_path / "out", "--check")[0] == 0
    assert (tmp_path / "kept").exists()


def test_a_spec_of_the_users_own_goes_by_its_name_too(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("new", "mine", "--from", "llama")[0] == 0
    assert run("build", "mine", "--out", "gen")[0] == 0
    code, printed = run("explain", "gen/mine/walker.py:45")
    assert code == 0, printed
    assert "(specs/mine.yaml:" in printed
    Path("specs/mine.yaml").unlink()
    code, printed = run("explain", "gen/mine/walker.py:45")
    assert code == 2
    assert "no spec `mine`" in printed


def test_a_folder_without_specs_is_named(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("init") == (0, "wrote specs\nwrote generated\nwrote schema/flexgen.schema.json\n" + NEXT)
    for command in ("check", "build", "diff"):
        code, printed = run(command)
        assert code == 2
        assert "there is no spec in specs: " in printed
    assert run("init") == (0, f". is a project already\n{NEXT}")


def test_a_failure_of_our_own_is_one_message(run, monkeypatch):
    def fail(_: object) -> None:
        raise KeyError("lost")

    monkeypatch.setattr(shared, "find_specs", fail)
    assert run("check") == (4, "error: KeyError: 'lost'\nFLEXGEN_DEBUG=1 shows where it happened\n")


def test_a_terminal_without_the_letters_shows_their_numbers(tmp_path, monkeypatch):
    spec = tmp_path / "x.yaml"
    spec.write_text("flexgen: 1\nname: é\n", "utf-8")
    for arguments, found in ((["check", str(spec)], "\\xe9"), (["check", str(spec), "--format", "json"], "\\u00e9")):
        out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, out)
        monkeypatch.setattr(sys, "argv", ["flexgen", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = out.buffer.getvalue().decode("ascii")
        assert ended.value.code == 3
        assert found in printed
        if "json" in arguments:
            assert json.loads(printed)["diagnostics"]


def test_an_interrupt_while_it_loads_has_no_traceback(tmp_path):
    """What Ctrl-C raises comes from a module that is being imported."""
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(root("specs").parent)])}
    command = [sys.executable, "-c", "from flexgen.__main__ import main; main()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize("buffering", [-1, 10**6], ids=["while it writes", "before it ends"])
def test_a_reader_that_leaves_early_is_no_error(buffering):
    run = (
        f"import sys; sys.stdout = open(1, 'w', buffering={buffering}, closefd=False); sys.argv = ['flexgen', 'explain', "
        "'SPEC004']; from flexgen.cli import main; main()"
    )
    process = subprocess.Popen([sys.executable, "-c", run], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() in (1, -signal.SIGPIPE)


def test_a_mark_of_byte_order_is_no_part_of_the_first_prompt(tmp_path):
    from flexgen.cli.models import _lines, _read

    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffthe fox\na dog\n".encode())
    assert _lines(_read(file)) == ["the fox", "a dog"]


def test_colours_are_for_a_person(run, tmp_path, monkeypatch):
    spec = tmp_path / "x.yaml"
    spec.write_text("flexgen: 1\nnam: x\n", "utf-8")
    monkeypatch.delenv("NO_COLOR", raising=False)
    plain = run("check", spec)[1]
    assert "\x1b" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    colour = run("check", spec)[1]
    assert colour != plain and re.sub(r"\x1b\[[0-9;]*m", "", colour) == plain
    assert "\x1b[1;31merror[SPEC" in colour and re.search(r"\x1b\[1;31m *\^", colour)


def test_every_help_says_how_it_ends():
    commands = get_command(cli.app).commands
    assert all("Exit codes: 0 fine" in command.epilog for command in commands.values())
    assert {name for name, command in commands.items() if "1 something differs" in command.epilog} == {"build", "diff", "schema", "verify"}


@pytest.mark.parametrize("wrong", [("--max-tokens", "0"), ("--dtype", "int3"), ("--device", "tpu"),
                                   ("--top-p", "2")])  # fmt: skip
def test_a_bad_argument_of_generate_is_wrong_usage(run, wrong):
    _, folder = saved("llama")
    code, printed = run("generate", folder, "-p", "x", *wrong)
    assert code == 2 and printed.startswith("error: "), printed
