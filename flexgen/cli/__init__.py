"""The command line: parse, call, print.

    here      the app itself, and how every command ends: 0 fine, 1 differs, 2 usage, 3 invalid input, 4 failure, 130 interrupted
    specs     commands about specs and generated code
    models    commands that run one
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from typing import Annotated, Any

import typer

from flexgen import __version__
from flexgen.cli import models, specs
from flexgen.cli.shared import app, diagnosed
from flexgen.compiler import UsageError
from flexgen.errors import FlexgenError
from flexgen.spec.diagnostics import SpecError

__all__ = ["app", "main", "models", "specs"]


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
        print(diagnosed(error.diagnostics), end="", file=sys.stderr)
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
