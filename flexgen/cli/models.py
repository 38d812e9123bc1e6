"""Commands that run models."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from flexgen.cli.shared import ENDS, Generated, app, or_usage
from flexgen.compiler import UsageError


@app.command(epilog=ENDS)
def demo() -> None:
    """Answer three prompts with a small real model."""
    from rich.console import Console

    from flexgen.demo import run

    run(Console())


@app.command(epilog=ENDS)
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


@app.command(epilog=ENDS)
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
    params = or_usage(lambda: SamplingParams(temperature=temperature, top_p=top_p, n=n, seed=seed, max_tokens=max_tokens))
    llm = or_usage(
        lambda: LLM(
            model, spec=spec, generated=generated, device=device, dtype=dtype, max_model_len=max_model_len, revision=revision
        )
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


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8-sig")  # some editors put a mark of byte order first
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: byte {error.start} is not UTF-8: save the prompts as UTF-8") from None


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line]
