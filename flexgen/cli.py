"""The command line: parse, call, print. Exit codes: 0 fine, 1 differs, 2 usage, 3 invalid input, 4 failure, 130 interrupted."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from flexgen import __version__, compiler
from flexgen.compiler import Checked, UsageError, check, find_specs, named, shown
from flexgen.errors import FlexgenError
from flexgen.project import here, projects
from flexgen.spec.codes import CODES
from flexgen.spec.diagnostics import Diagnostic, SpecError, nearest, render_json, render_text
from flexgen.spec.source import split_lines

app = typer.Typer(no_args_is_help=True)
Specs = Annotated[list[str] | None, typer.Argument(metavar="[SPEC]...", help="Paths or names of specs; none: all.")]
Generated = Annotated[Path | None, typer.Option(help="Another folder of generated packages.")]


class Format(StrEnum):
    """How a command prints."""

    text = "text"
    json = "json"


class DiffFormat(StrEnum):
    """How a comparison prints."""

    text = "text"
    json = "json"
    markdown = "markdown"


def _version(wanted: bool) -> None:
    if wanted:
        print(f"flexgen {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """A compiler for language-model engines. Exit codes: 0 fine, 1 differs, 2 usage, 3 invalid input, 4 failure."""


def main() -> None:
    """Run a command; turn every error into one message and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that cannot show a letter shows its number
    try:
        code = app(prog_name="flexgen", standalone_mode=False) or 0  # typer hands back the code of its own Exit
        sys.stdout.flush()
        sys.exit(code)
    except SystemExit:
        raise
    except BrokenPipeError:  # nobody reads on; what is still buffered goes nowhere, without a word at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except Exception as error:  # the outermost frame: nothing may end in a traceback
        sys.exit(_report(error))


def _report(error: Exception) -> int:
    """Say what is wrong, and what to do, in one message. -> the exit code"""
    if os.environ.get("FLEXGEN_DEBUG") == "1":
        traceback.print_exc()
    if hasattr(error, "exit_code"):  # click's own: usage errors and exits
        if error.exit_code and hasattr(error, "format_message") and (message := _usage(error)):
            print(f"error: {message}", file=sys.stderr)
        return int(error.exit_code)
    if isinstance(error, SpecError):
        print(_text(error.diagnostics), end="", file=sys.stderr)
        return 3
    if isinstance(error, OSError) and error.filename is not None:
        print(f"error: cannot use {os.fsdecode(error.filename)}: {error.strerror}", file=sys.stderr)
        return 4
    if isinstance(error, FlexgenError | ValueError):
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 3
    print(f"error: {type(error).__name__}: {error}\nFLEXGEN_DEBUG=1 shows where it happened", file=sys.stderr)
    return 4


def _usage(error: Any) -> str:
    """What click says of a command line, and where the command's options are listed; empty where it printed help."""
    message = error.format_message().removesuffix(".").replace("Value error, ", "")
    command = error.ctx.command_path if error.ctx else "flexgen"
    return f"{message}: see `{command} --help`" if message else ""


def _text(diagnostics: Iterable[Diagnostic]) -> str:
    """Diagnostics with excerpts of the files they are about."""
    listed = list(diagnostics)
    files = {item.path: Path(item.path) for item in listed}
    return render_text(listed, {name: split_lines(path.read_bytes()) for name, path in files.items() if path.is_file()})


def _list(what: str, paths: Iterable[Path]) -> None:
    for path in paths:
        print(f"{what} {shown(path)}")


def _checked(specs: list[str] | None) -> list[Checked]:
    return [check(path) for path in find_specs(specs or [])]


def _refuse(checked: list[Checked]) -> None:
    """Print the diagnostics of specs that are wrong and exit 3."""
    diagnostics = [diagnostic for item in checked for diagnostic in item.diagnostics]
    if diagnostics:
        print(_text(diagnostics), end="", file=sys.stderr)
        raise typer.Exit(3)


@app.command("check")
def check_command(specs: Specs = None, format: Format = Format.text) -> None:
    """Validate specs without building them."""
    from flexgen.new.text import MARK

    checked = _checked(specs)
    if format is Format.json:
        print(render_json([d for item in checked for d in item.diagnostics]), end="")
        raise typer.Exit(3 if any(item.diagnostics for item in checked) else 0)
    _refuse(checked)
    named(checked)
    for item in checked:
        open_marks = item.path.read_text(encoding="utf-8").count(MARK)
        print(f"ok {item.path.stem}" + (f"; decisions that are still marked `{MARK}`: {open_marks}" if open_marks else ""))


@app.command()
def build(
    specs: Specs = None,
    out: Annotated[Path | None, typer.Option("--out", "--generated", help="Folder of the generated packages.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 where files differ.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing; list what would be written.")] = False,
) -> None:
    """Generate the packages of specs."""
    checked = _checked(specs)
    _refuse(checked)
    folder = compiler.output_folder(out, writes=not (check or dry_run))
    built = compiler.build(checked)
    differs = 0
    if not (check or dry_run):
        for written in compiler.write(built, folder):
            print(f"wrote {shown(written)}")
    else:
        for package, found in compiler.difference(built, folder):
            differs += 1
            command = ["flexgen", "build", shown(package.path), *(["--out", str(out)] if out else [])]
            file = shown(found.path)
            print(f"{found.change} {file}: {f'remove {file}' if found.change == 'EXTRA' else shlex.join(command)}")
    for orphan in [] if specs or out else compiler.orphans(built, folder):
        differs += 1
        print(f"EXTRA {shown(orphan)}: no spec makes it; remove the folder")
    if check and differs:
        raise typer.Exit(1)


@app.command("init")
def init_command(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="The folder; none: this one.")] = Path(),
) -> None:
    """Make a folder a project of your own: specs/, generated/, and the schema for editors. What is there stays."""
    from flexgen.new.write import init

    made = init(folder)
    _list("wrote", made)
    if not made:
        print(f"{shown(folder)} is a project already")
    print("next: flexgen new NAME --config DIR, or a spec of your own in specs/")


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Name of the new spec.")],
    spec: Annotated[str | None, typer.Option("--from", help="A spec to start from, by path or name.")] = None,
    config: Annotated[Path | None, typer.Option(help="A config.json, or a directory that holds one.")] = None,
    out: Annotated[Path | None, typer.Option(help="The file to write; else specs/NAME.yaml.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")] = False,
) -> None:
    """Draft a spec from another one or from a config.json; what these cannot settle is marked `# TODO decide:`.

    Exit codes: 0 written, 2 a file of that name is there or no such spec, 3 the config or the spec is wrong.
    """
    from flexgen.new.write import draft, for_editors, init, target, write

    made, source = draft(name, spec, config)
    path = target(name, out)
    if out is None and here() is None:
        _list("wrote", init(Path.cwd()))
    write(path, for_editors(made.text, path), force)
    print(f"wrote {shown(path)} from {source}")
    print(f"{made.decisions} decisions are marked `# TODO decide:`")
    for line in made.unsupported:
        print(f"unsupported: {line}")
    print(f"next: flexgen check {shown(path)}")


@app.command()
def diff(
    against: Annotated[
        str | None,
        typer.Argument(help="A package, a folder of packages, another project, or a commit; none: the files in generated/."),
    ] = None,
    format: Annotated[DiffFormat, typer.Option(help="markdown is for a pull request.")] = DiffFormat.text,
) -> None:
    """Compare what specs and templates make with other generated code: each distinct change once, and why.

    Exit codes: 0 no difference, 1 differences, 2 no such commit or directory, 3 a spec or template is wrong.
    """
    from flexgen.diff import show
    from flexgen.diff.report import compare
    from flexgen.diff.sides import made, narrowed, other

    checked = _checked(None)
    _refuse(checked)
    named(checked)
    project = projects()[0].folder
    old = other(project, against)
    report = compare(old, narrowed(made(project), old))
    shown = {DiffFormat.text: show.text, DiffFormat.json: show.as_json, DiffFormat.markdown: show.markdown}
    print(shown[format](report), end="")
    raise typer.Exit(1 if report else 0)


@app.command()
def schema(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 where a file differs.")] = False,
) -> None:
    """Write the JSON Schema that editors use, and the reference pages made from the same models."""
    from flexgen.runtime.surface import page
    from flexgen.spec.reference import diagnostics_catalogue, spec_reference
    from flexgen.spec.schema import json_schema

    project = here()
    if project is None:
        raise UsageError("there is no project here or above: `flexgen init` makes one, with the schema in it")
    made = {project.schema: json_schema()}
    if project.is_own:
        docs = project.folder / "docs"
        made |= {docs / "spec.md": spec_reference(), docs / "diagnostics.md": diagnostics_catalogue(), docs / "vllm.md": page()}
    differs = [path for path, text in made.items() if not path.exists() or path.read_text("utf-8") != text]
    for path in differs:
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(made[path], "utf-8")
        print(f"CHANGED {shown(path)}: flexgen schema" if check else f"wrote {shown(path)}")
    raise typer.Exit(1 if check and differs else 0)


@app.command()
def explain(
    what: Annotated[
        str | None,
        typer.Argument(help="A diagnostic's code (SPEC004), a generated line (generated/llama/walker.py:80), or a spec."),
    ] = None,
    path: Annotated[str | None, typer.Argument(help="A place in the spec, such as attention.full.rope.")] = None,
    map: Annotated[bool, typer.Option("--map", help="Print where every generated line comes from, as JSON.")] = False,
) -> None:
    """Explain a diagnostic, a generated line, a spec or a place in one."""
    code = (what or "").upper()
    if code in CODES and path is None and not map:
        print(CODES[code].explain(), end="")
        return
    if code in CODES:
        raise UsageError(f"{code} is a diagnostic, which has no places and no map: flexgen explain {code}")
    if re.fullmatch("SPEC[0-9]*", code):
        near = nearest(code, CODES)
        raise UsageError(f"no diagnostic `{what}`" + (f": did you mean {near}?" if near else f": {', '.join(CODES)}"))
    if what is None and not map:
        raise UsageError("give a code, a generated line, or a spec")
    from flexgen import explain as explaining

    if map:
        print(explaining.whole_map(what), end="")
    elif line := explaining.LINE.fullmatch(what or ""):
        print(explaining.explain_line(Path(line[1]), int(line[2])), end="")
    else:
        print(explaining.explain_path(what or "", path) if path else explaining.explain_spec(what or ""), end="")


@app.command()
def verify(
    spec: Annotated[str, typer.Argument(help="A spec by name or path, or the folder of a generated package.")],
    checkpoint: Annotated[Path | None, typer.Option(help="A checkpoint instead of the spec's tiny model.")] = None,
    dtype: str = "float32",
    device: str = "cpu",
    generated: Generated = None,
    format: Format = Format.text,
) -> None:
    """Compare a generated package with transformers, and name the first place that differs."""
    from flexgen.verify import verify as run

    report = run(spec, checkpoint=checkpoint, dtype=dtype, device=device, generated=generated)
    print(report.to_json() if format is Format.json else report.to_text())
    raise typer.Exit(0 if report.ok else 1)


@app.command()
def demo() -> None:
    """Answer three prompts with a small real model."""
    from rich.console import Console

    from flexgen.demo import run

    run(Console())


@app.command()
def bench(
    models: Annotated[list[str] | None, typer.Argument(metavar="[MODEL]...", help="Names of shapes; none: all.")] = None,
    workload: Annotated[list[str] | None, typer.Option(help="decode or rollout; repeat for both.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Batch sizes of decode; repeat for more.")] = None,
    engine: Annotated[list[str] | None, typer.Option(help="flexgen or transformers; repeat for both.")] = None,
    layers: Annotated[int | None, typer.Option(help="Only the first layers, for a try on a small machine.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Timed calls of each figure, whose median counts.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the figures, one JSON each.")] = Path("benchmarks/results/engines"),
    profile: Annotated[bool, typer.Option("--profile", help="Instead: which kernels take prefill and decode.")] = False,
    page: Annotated[bool, typer.Option("--page", help="Instead: RESULTS.md and plots, two folders above the figures.")] = False,
) -> None:
    """Measure tokens a second and memory of full-size models with random weights."""
    from rich.console import Console

    from flexgen.bench.command import run_bench, run_profile
    from flexgen.bench.page import write_page
    from flexgen.bench.results import load_results

    if page + profile + bool(engine or repeats) > 1 or (page and (models or workload or batch or layers)):
        raise UsageError("--page, --profile and --engine or --repeats exclude each other, and --page takes but --out")
    if page:
        if not (results := load_results(out)):
            raise UsageError(f"{out} holds no figures to make a page of: measure some, or give their folder as --out")
        for path in write_page(results, out.parent.parent):
            print(f"wrote {path}")
    elif profile:
        run_profile(Console(), models, workload, batch, layers, out)
    else:
        run_bench(Console(), models, workload, batch, engine, layers, out, repeats)


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="A checkpoint's directory, or a name on the Hub such as Qwen/Qwen3-0.6B.")],
    prompt: Annotated[list[str] | None, typer.Option("-p", "--prompt", help="A prompt; repeat for more.")] = None,
    file: Annotated[Path | None, typer.Option("-f", "--file", help="A file of prompts, one a line; - is stdin.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens that hold this probability.")] = 1.0,
    n: Annotated[int, typer.Option("--n", help="Answers to each prompt.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Draw the same tokens again.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a prompt, with token ids, when it is answered.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; none: a GPU if there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Most tokens of prompt and answer together.")] = None,
    revision: Annotated[str | None, typer.Option(help="A branch, tag or commit of a model on the Hub.")] = None,
    spec: Annotated[str | None, typer.Option("--spec", help="The spec to serve it by, where several do; a name or file.")] = None,
    generated: Generated = None,
) -> None:
    """Continue prompts from arguments, a file or stdin, streaming."""
    from flexgen import LLM, SamplingParams
    from flexgen.runtime.requests.templates import options

    prompts = list(prompt or ())
    if file is not None:
        prompts += _lines(sys.stdin.read().removeprefix("\ufeff") if str(file) == "-" else _read(file))
    if not prompts and not sys.stdin.isatty():
        prompts = _lines(sys.stdin.read().removeprefix("\ufeff"))
    if not prompts:
        raise UsageError("no prompt: give -p TEXT, -f FILE, or text on stdin")
    params = _or_usage(lambda: SamplingParams(temperature=temperature, top_p=top_p, n=n, seed=seed, max_tokens=max_tokens))
    llm = LLM(
        model, spec=spec, generated=generated, device=device, dtype=dtype, max_model_len=max_model_len, revision=revision
    )
    for text in prompts:
        given: str | dict[str, list[int]] = text
        if chat:
            message = [{"role": "user", "content": text}]
            given = {"prompt_token_ids": llm.llm_engine.tokens.chat(message, **options({}, None))}
        if as_json:
            (output,) = llm.generate([given], params, use_tqdm=False)
            answers = [{"text": each.text, "token_ids": each.token_ids, "finish_reason": each.finish_reason} for each in output.outputs]
            print(json.dumps({"prompt": text, "prompt_token_ids": output.prompt_token_ids, "outputs": answers}), flush=True)
        elif n > 1:
            (output,) = llm.generate([given], params, use_tqdm=False)
            print("\n\n".join(each.text for each in output.outputs), flush=True)
        else:
            _stream(llm, given, params)


def _stream(llm: Any, prompt: Any, params: Any) -> None:
    shown = 0
    for output in llm.stream([prompt], params):
        grown = output.outputs[0].text
        print(grown[shown:], end="", flush=True)
        shown = len(grown)
    print()


def _or_usage(make: Callable[[], Any]) -> Any:
    """What `make` makes; a value out of range is a mistake of the command line."""
    try:
        return make()
    except ValueError as error:
        raise UsageError(str(error)) from None


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8-sig")  # some editors put a mark of byte order first
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: byte {error.start} is not UTF-8: save the prompts as UTF-8") from None


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line]
