"""RESULTS.md and its plots, made from the measured figures alone."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from flexgen.bench.peers import VLLM, VLLM_STARTUP_SECONDS
from flexgen.bench.results import Result
from flexgen.bench.shapes import SHAPES
from flexgen.bench.workloads import DECODE
from flexgen.errors import FlexgenError


def write_page(results: Sequence[Result], folder: Path) -> list[Path]:
    """Write RESULTS.md and one SVG a model into `folder`; the paths written. Needs matplotlib (the extra `bench`)."""
    if find_spec("matplotlib") is None:
        raise FlexgenError("the plots need matplotlib, and it is not installed: pip install 'flexgen[bench]'")
    plots = [_plot(model, results, folder / "plots") for model in _models(results) if _plotted(results, model)]
    page = folder / "RESULTS.md"
    page.write_text(results_page(results))
    return [page, *plots]


def results_page(results: Sequence[Result]) -> str:
    """The page as text, a section a model."""
    if not results:
        return "# Measured speed\n\nNothing is measured yet.\n"
    lines = [
        "# Measured speed",
        "",
        "Made by `flexgen bench --page` from `results/engines/`; each figure's file holds its command, versions and commit.",
        "",
        "- **decode**: prompts of 12 tokens, greedy, 128 new tokens each, whole call, median of 3 calls or of as many as the file says.",
        "- **rollout**: 256 prompts of 256 tokens, 512 new tokens each, temperature 1, with logprobs, whole call.",
        "- **bound**: the bytes that a decode step must read (weights, of experts those that the step's tokens go to, keys, "
        "values and state at their mean length) over 4.15 TB/s. Prefill, which a whole call includes, is not in it.",
        "- **start-up** depends on the compiler's cache: docs/performance.md has first and later starts.",
        "- **vLLM**: 0.26.0 on the same kind of card and workloads, from an earlier measurement. Its figures for "
        "gpt-oss-20b are loose upper figures: its dummy weights sent all tokens to the same experts. By its rule the recurrent "
        "state of qwen3.6-35b-a3b was bf16; here it is fp32 by default, and bf16 where the name says so.",
        "",
    ]
    for model in _models(results):
        lines += _section(model, [result for result in results if result.model == model])
    return "\n".join(lines)


def _models(results: Sequence[Result]) -> list[str]:
    measured = {result.model for result in results}
    return [model for model in SHAPES if model in measured] + sorted(measured - SHAPES.keys())


def _plotted(results: Sequence[Result], model: str) -> list[Result]:
    """The figures of a model's plot, by batch."""
    decode = [result for result in results if result.model == model and result.workload == DECODE.name]
    return sorted(decode, key=lambda result: result.batch)


def _section(model: str, results: Sequence[Result]) -> list[str]:
    ours = [result for result in results if result.engine == "flexgen"]
    lines = [f"## {model}", ""]
    if _plotted(results, model):
        lines += [f"![tokens a second over batch size](plots/{model}.svg)", ""]
    lines += [
        "| workload | batch | tok/s | of the bound | vLLM | against vLLM | transformers | against it | experts touched |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for result in sorted(ours, key=lambda each: (each.workload, each.batch)):
        key = (result.workload, result.batch)
        theirs = {(r.workload, r.batch): r.tokens_per_second for r in results if r.engine == "transformers"}
        bound = result.bound_tokens_per_second
        cells = [
            result.workload,
            str(result.batch),
            f"{result.tokens_per_second:.0f}",
            f"{result.tokens_per_second / bound:.0%}" if bound else "",
            *_against(result, VLLM.get(model, {}).get(key)),
            *_against(result, theirs.get(key)),
            f"{result.experts_touched:.1f}" if result.experts_touched else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", *_footer(model, ours), ""]
    return lines


def _against(result: Result, other: float | None) -> tuple[str, str]:
    return (f"{other:.0f}", f"{result.tokens_per_second / other:.2f} x") if other else ("", "")


def _footer(model: str, ours: Sequence[Result]) -> list[str]:
    if not ours:
        return []
    last = max(ours, key=lambda each: each.peak_bytes)
    start = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in last.startup_seconds.items())
    rest = last.peak_bytes - last.weight_bytes - (last.kv_bytes or 0)
    lines = [
        f"{last.device}, " + ", ".join(f"{name} {number}" for name, number in last.versions.items()) + ".",
        f"Start-up: {start}" + (f" (vLLM: {VLLM_STARTUP_SECONDS[model]} s)." if model in VLLM_STARTUP_SECONDS else "."),
    ]
    if last.peak_bytes:  # not known on a host
        lines.append(
            f"Peak memory {last.peak_bytes / 2**30:.1f} GiB: weights {last.weight_bytes / 2**30:.1f}, keys, values and state "
            f"{(last.kv_bytes or 0) / 2**30:.1f}, the rest {rest / 2**30:.2f}."
        )
    if last.uncaptured:
        lines.append("Without a graph: " + "; ".join(last.uncaptured) + ".")
    return lines


def _plot(model: str, results: Sequence[Result], folder: Path) -> Path:
    import matplotlib
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{model}.svg"
    decode = _plotted(results, model)
    with matplotlib.rc_context({"svg.hashsalt": model, "svg.fonttype": "none"}):
        figure = Figure(figsize=(6, 3.6), layout="constrained")
        axes = figure.add_subplot(xlabel="batch", ylabel="tokens a second", title=model, xscale="log", yscale="log")
        for engine in ("flexgen", "transformers"):
            points = [(r.batch, r.tokens_per_second) for r in decode if r.engine == engine]
            if points:
                axes.plot(*zip(*points), marker="o", label=engine)
        peers = sorted(
            (batch, rate) for (workload, batch), rate in VLLM.get(model, {}).items() if workload == DECODE.name
        )
        if peers:
            axes.plot(*zip(*peers), marker="s", label="vLLM 0.26.0")
        bound = [(r.batch, r.bound_tokens_per_second) for r in decode if r.bound_tokens_per_second]
        if bound:
            axes.plot(*zip(*bound), linestyle="--", color="grey", label="bound")
        ticks = sorted({r.batch for r in decode})
        axes.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
        axes.xaxis.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(path, metadata={"Date": None, "Creator": None})
    return path
