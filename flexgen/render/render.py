"""Architecture + templates -> the files of a generated package, in memory, linted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from jinja2 import Environment, FunctionLoader, StrictUndefined, TemplateNotFound, TemplateSyntaxError

from flexgen.assets import root
from flexgen.contract.abi import ABI
from flexgen.errors import FlexgenError
from flexgen.ir.architecture import Architecture
from flexgen.render.filters import FILTERS
from flexgen.render.lint import Problem, lint
from flexgen.render.marks import MARK, Mark, MarkedEnvironment, Recorder, watch

FILES = ("attention.py", "merge.py", "walker.py")


class RenderError(FlexgenError):
    """A template that cannot be rendered, or rendered something wrong: our bug or a broken template, never the spec's."""


def render(architecture: Architecture, templates: Path | Mapping[str, str] | None = None) -> dict[str, str]:
    """All files of the package by name, manifest included. `templates` is a folder, or texts by name.

    Raises RenderError naming template, line and spec.
    """
    sources = templates if isinstance(templates, Mapping) else read_templates(templates or root("templates"))
    files = {name: _render_file(architecture, name, sources) for name in FILES}
    files["manifest.json"] = manifest(architecture, files)
    return files


def read_templates(folder: Path) -> dict[str, str]:
    """The templates below a folder: their texts by name, as in `partials/step.j2`."""
    return {path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in sorted(folder.rglob("*.j2"))}


def manifest(architecture: Architecture, files: dict[str, str]) -> str:
    """What the runtime reads before it imports the package: which checkpoints it serves, and each file's hash."""
    checkpoint = architecture.checkpoint
    content = {
        "name": architecture.name,
        "abi": ABI,
        "source": architecture.source,
        "digest": architecture.digest,
        "model_types": checkpoint.model_types,
        "text_config": checkpoint.text_config,
        "defaults": checkpoint.defaults,
        "require": checkpoint.require,
        "files": {name: hashlib.sha256(text.encode()).hexdigest() for name, text in sorted(files.items())},
    }
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def render_marked(
    architecture: Architecture, name: str, templates: Mapping[str, str] | None = None
) -> list[tuple[str, list[Mark]]]:
    """The lines of one file, each with the marks of the template lines that wrote it; none: the line before goes on.

    Raises RenderError.
    """
    environment = _environment(templates or read_templates(root("templates")), MarkedEnvironment)
    assert isinstance(environment, MarkedEnvironment)
    environment.recorder = recorder = Recorder()
    raw = _text(watch(architecture, "", recorder), name, environment).split("\n")
    lines = [(MARK.sub("", line).rstrip(), [recorder.marks[int(number)] for number in MARK.findall(line)]) for line in raw]
    return [lines[index] for index in _kept([text for text, _ in lines])]


def _render_file(architecture: Architecture, name: str, templates: Mapping[str, str]) -> str:
    lines = [line.rstrip() for line in _text(architecture, name, _environment(templates)).split("\n")]
    text = "".join(f"{lines[index]}\n" for index in _kept(lines))
    problems = lint(text)
    if problems:
        marked = render_marked(architecture, name, templates)
        raise RenderError("\n".join(_wrong(problem, marked, architecture, name) for problem in problems))
    return text


def _wrong(problem: Problem, marked: list[tuple[str, list[Mark]]], architecture: Architecture, name: str) -> str:
    """A problem of a generated line, at the template lines that wrote it, outermost first."""
    above = marked[: problem.line]  # what is never closed is missed one line after the last
    marks = next((marks for _, marks in reversed(above) if marks), [])
    where = ", ".join(dict.fromkeys(f"templates/{mark.template}:{mark.line}" for mark in marks)) or f"templates/{name}.j2"
    made = f"generated/{architecture.name}/{name}:{len(above)}: {above[-1][0].strip()}" if above else "it writes nothing"
    return f"{where}: {problem.message} (rendering {architecture.source})\n  {made}"


def _text(architecture: Architecture, name: str, environment: Environment) -> str:
    """What the template writes; with marks, where the environment leaves them."""
    try:
        return environment.get_template(f"{name}.j2").render(arch=architecture, abi=ABI)
    except TemplateSyntaxError as error:
        where = f"templates/{error.name}:{error.lineno}"
        raise RenderError(f"{where}: {error.message} (rendering {architecture.source})") from None
    except TemplateNotFound as error:
        message = f"{_template_line(error)}: there is no template {error.name} (rendering {architecture.source})"
        raise RenderError(message) from None
    except Exception as error:  # a template can go wrong in any way that an expression can
        message = f"{_template_line(error)}: {error or type(error).__name__} (rendering {architecture.source})"
        raise RenderError(message) from None


def _template_line(error: BaseException) -> str:
    """The innermost template line of a rendering error."""
    found = "templates"
    trace = error.__traceback__
    while trace is not None:
        filename = trace.tb_frame.f_code.co_filename
        if filename.startswith("templates/"):
            found = f"{filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _kept(lines: Sequence[str]) -> list[int]:
    """The lines that stay: at most two blank ones in a row, and none at the ends."""
    full = [index for index, line in enumerate(lines) if line]
    spans = zip([full[0] - 1, *full], full) if full else ()
    return [index for before, index in spans for index in (*range(before + 1, index)[:2], index)]


def _environment(templates: Mapping[str, str], kind: type[Environment] = Environment) -> Environment:
    return _cached_environment(tuple(sorted(templates.items())), kind)  # type: ignore[arg-type]


@lru_cache(maxsize=4)
def _cached_environment(sources: tuple[tuple[str, str], ...], kind: type[Environment]) -> Environment:
    """Keyed by the templates' texts, so that one which changed is never taken for what it was."""
    texts = dict(sources)
    environment = kind(
        loader=FunctionLoader(lambda name: (texts[name], f"templates/{name}", None) if name in texts else None),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters.update(FILTERS)
    return environment
