"""Commands about specs and the code that is generated from them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated

import typer

from flexgen import compiler
from flexgen.cli.shared import DIFFERS, ENDS, DiffFormat, Format, Generated, Specs, app, checked_specs, listed, refuse
from flexgen.compiler import UsageError, named, shown
from flexgen.project import here, projects
from flexgen.spec.codes import CODES
from flexgen.spec.diagnostics import nearest, render_json


@app.command("check", epilog=ENDS)
def check_command(specs: Specs = None, format: Format = Format.text) -> None:
    """Validate specs without building them."""
    from flexgen.new.text import MARK

    checked = checked_specs(specs)
    if format is Format.json:
        print(render_json([d for item in checked for d in item.diagnostics]), end="")
        raise typer.Exit(3 if any(item.diagnostics for item in checked) else 0)
    refuse(checked)
    named(checked)
    for item in checked:
        open_marks = item.path.read_text(encoding="utf-8").count(MARK)
        print(f"ok {item.path.stem}" + (f"; decisions that are still marked `{MARK}`: {open_marks}" if open_marks else ""))


@app.command(epilog=DIFFERS)
def build(
    specs: Specs = None,
    out: Annotated[Path | None, typer.Option("--out", "--generated", help="Folder of the generated packages.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 where files differ.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing; list what would be written.")] = False,
) -> None:
    """Generate the packages of specs."""
    checked = checked_specs(specs)
    refuse(checked)
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


@app.command("init", epilog=ENDS)
def init_command(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="The folder; none: this one.")] = Path(),
) -> None:
    """Make a folder a project of your own: specs/, generated/, and the schema for editors. What is there stays."""
    from flexgen.new.write import init

    made = init(folder)
    listed("wrote", made)
    if not made:
        print(f"{shown(folder)} is a project already")
    print("next: flexgen new NAME --config DIR, or a spec of your own in specs/")


@app.command(epilog=ENDS)
def new(
    name: Annotated[str, typer.Argument(help="Name of the new spec.")],
    spec: Annotated[str | None, typer.Option("--from", help="A spec to start from, by path or name.")] = None,
    config: Annotated[Path | None, typer.Option(help="A config.json, or a directory that holds one.")] = None,
    out: Annotated[Path | None, typer.Option(help="The file to write; else specs/NAME.yaml.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")] = False,
) -> None:
    """Draft a spec from another one or from a config.json; what these cannot settle is marked `# TODO decide:`.
    """
    from flexgen.new.write import draft, for_editors, init, target, write

    made, source = draft(name, spec, config)
    path = target(name, out)
    if out is None and here() is None:
        listed("wrote", init(Path.cwd()))
    write(path, for_editors(made.text, path), force)
    print(f"wrote {shown(path)} from {source}")
    print(f"{made.decisions} decisions are marked `# TODO decide:`")
    for line in made.unsupported:
        print(f"unsupported: {line}")
    print(f"next: flexgen check {shown(path)}")


@app.command(epilog=DIFFERS)
def diff(
    against: Annotated[
        str | None,
        typer.Argument(help="A package, a folder of packages, another project, or a commit; none: the files in generated/."),
    ] = None,
    format: Annotated[DiffFormat, typer.Option(help="markdown is for a pull request.")] = DiffFormat.text,
) -> None:
    """Compare what specs and templates make with other generated code: each distinct change once, and why.
    """
    from flexgen.diff import show
    from flexgen.diff.report import compare
    from flexgen.diff.sides import made, narrowed, other

    checked = checked_specs(None)
    refuse(checked)
    named(checked)
    project = projects()[0].folder
    old = other(project, against)
    report = compare(old, narrowed(made(project), old))
    shown = {DiffFormat.text: show.text, DiffFormat.json: show.as_json, DiffFormat.markdown: show.markdown}
    print(shown[format](report), end="")
    raise typer.Exit(1 if report else 0)


@app.command(epilog=DIFFERS)
def schema(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 where a file differs.")] = False,
) -> None:
    """Write the JSON Schema that editors use, and the reference pages made from the same models."""
    from flexgen.runtime.surface import page
    from flexgen.spec.families import with_table
    from flexgen.spec.reference import diagnostics_catalogue, spec_reference
    from flexgen.spec.schema import json_schema

    project = here()
    if project is None:
        raise UsageError("there is no project here or above: `flexgen init` makes one, with the schema in it")
    made = {project.schema: json_schema()}
    if project.is_own:
        docs = project.folder / "docs"
        readme = project.folder / "README.md"
        made |= {docs / "spec.md": spec_reference(), docs / "diagnostics.md": diagnostics_catalogue(), docs / "vllm.md": page()}
        made[readme] = with_table(readme.read_text("utf-8"), sorted(project.specs.glob("*.yaml")))
    differs = [path for path, text in made.items() if not path.exists() or path.read_text("utf-8") != text]
    for path in differs:
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(made[path], "utf-8")
        print(f"CHANGED {shown(path)}: flexgen schema" if check else f"wrote {shown(path)}")
    raise typer.Exit(1 if check and differs else 0)


@app.command(epilog=ENDS)
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


@app.command(epilog=DIFFERS)
def verify(
    spec: Annotated[str, typer.Argument(help="A spec by name or path, or the folder of a generated package.")],
    checkpoint: Annotated[Path | None, typer.Option(help="A checkpoint instead of the spec's tiny model.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16: hold every cast, bit for bit.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    generated: Generated = None,
    format: Format = Format.text,
) -> None:
    """Compare a generated package with transformers, and name the first place that differs."""
    from flexgen.verify import verify as run

    report = run(spec, checkpoint=checkpoint, dtype=dtype, device=device, generated=generated)
    print(report.to_json() if format is Format.json else report.to_text())
    raise typer.Exit(0 if report.ok else 1)
