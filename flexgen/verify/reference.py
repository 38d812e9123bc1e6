"""The oracle: a transformers model with eager attention and eager experts, and what its modules took and gave."""

from __future__ import annotations

import copy
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexgen.errors import FlexgenError

CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
"""What forwards of transformers call their cache, newest name first."""


def tiny(config: Mapping[str, Any], seed: int = 0) -> Any:
    """A model of a `tiny:` config with every tensor random. Raises FlexgenError where transformers lacks its type."""
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    fields = copy.deepcopy(dict(config))
    kind = fields.pop("model_type")
    if kind not in CONFIG_MAPPING:
        raise FlexgenError(
            f"transformers has no model of type {kind!r} to compare with: give `tiny` and `model_types` the type that "
            "config.json has, or install a release of transformers that knows it"
        )
    made = AutoConfig.for_model(kind, **{**_no_tokens(CONFIG_MAPPING[kind]), **fields})
    made._experts_implementation = "eager"
    with torch.random.fork_rng(devices=[]):  # what transformers draws first is seeded too
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(made, attn_implementation="eager").float().eval()
    randomise(model, seed)
    return _plain_on_host(model)


def _no_tokens(kind: type) -> dict[str, int | None]:
    """None for the ids of special tokens, which a small vocabulary need not hold; 0 where the class wants a number."""
    hints = {name: hint for base in reversed(kind.__mro__) for name, hint in vars(base).get("__annotations__", {}).items()}
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: None if "None" in str(hints.get(name)) else 0 for name in names}


def load(directory: Path, device: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a checkpoint."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory)
    for part in (config, config.get_text_config()):
        part._experts_implementation = "eager"
    with _no_bar():
        model = AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=dtype, attn_implementation="eager")
    return _plain_on_host(model.to(device).eval())  # type: ignore[arg-type]


_MIXERS = ("causal_conv1d_fn", "causal_conv1d_update", "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
"""Functions that transformers takes from packages with kernels for GPUs, where those are installed."""


def _plain_on_host(model: Any) -> Any:
    """Let recurrent mixers compute tensors on a host by transformers' own torch code, since those kernels cannot."""
    modeling = sys.modules[type(model).__module__]
    for name in _MIXERS:
        chosen = getattr(modeling, name, None)
        if chosen is not None and inspect.unwrap(chosen) is not chosen and not hasattr(chosen, "on_host"):
            setattr(modeling, name, _by_device(chosen, inspect.unwrap(chosen)))
    return model


def _by_device(chosen: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    accepted = inspect.signature(own).parameters

    @wraps(own)
    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.device.type != "cpu":
            return chosen(x, *args, **kwargs)
        return own(x, *args, **{name: value for name, value in kwargs.items() if name in accepted})

    run.on_host = own  # type: ignore[attr-defined]
    return run


def save(model: Any, directory: str | Path) -> None:
    """Write a checkpoint."""
    with _no_bar():
        model.save_pretrained(directory)


@contextmanager
def _no_bar() -> Iterator[None]:
    """Without the progress bar that transformers shows."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int) -> None:
    """Make every parameter and saved buffer random.

    Vectors move away from their initial ones and zeros, so that a gain or bias left out shows; matrices keep the size of
    what passes through them; embeddings are small enough that no logit saturates.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    for tensor in {id(t): t for t in model.state_dict(keep_vars=True).values()}.values():
        if not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=generator, device=device)
        if tensor.dim() < 2 or bool((tensor == tensor.flatten()[0]).all()):  # gains, and biases of stacked experts
            tensor.copy_(tensor + 0.25 * noise)
        elif id(tensor) in embeddings:
            tensor.copy_(0.5 * noise)
        else:
            tensor.copy_(noise / math.sqrt(min(tensor.shape[-2:]) if tensor.dim() == 3 else tensor.shape[-1]))


@torch.no_grad()
def logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """Logits (t, V) of one sequence in one pass."""
    return model(torch.tensor([list(tokens)], device=model.device)).logits[0]


@torch.no_grad()
def decoded_logits(model: Any, tokens: Sequence[int], prefill: int) -> Tensor:
    """Logits (t - prefill, V) of the tokens after the first `prefill`, fed one by one through the model's own cache."""
    accepted = inspect.signature(model.forward).parameters
    name = next((name for name in CACHE_ARGUMENTS if name in accepted), None)
    if name is None:
        raise TypeError(f"{type(model).__name__}.forward has none of the cache arguments {', '.join(CACHE_ARGUMENTS)}")
    cache, rows = None, []
    for chunk in (tokens[:prefill], *([token] for token in tokens[prefill:])):
        output = model(torch.tensor([list(chunk)], device=model.device), **{name: cache}, use_cache=True)
        cache = output[name]
        rows.append(output.logits[0, -1])
    return torch.stack(rows[1:])


@dataclass
class Call:
    """What one module took and gave in one pass; tensors are copies."""

    arguments: dict[str, Any]
    output: Any

    @property
    def input(self) -> Tensor | None:
        """The first tensor among the arguments: the hidden states of every layer and leaf."""
        return next((value for value in self.arguments.values() if isinstance(value, Tensor)), None)

    @property
    def first_output(self) -> Tensor | None:
        first = self.output[0] if isinstance(self.output, tuple) else self.output
        return first if isinstance(first, Tensor) else None


@contextmanager
def recorded(modules: Mapping[str, torch.nn.Module]) -> Iterator[dict[str, Call]]:
    """Record the call of each module while the context is open."""
    calls: dict[str, Call] = {}
    handles = []
    for name, module in modules.items():
        bind = inspect.signature(module.forward)

        def before(_: Any, args: Any, kwargs: Any, name: str = name, bind: inspect.Signature = bind) -> None:
            given = {}
            for key, value in bind.bind_partial(*args, **kwargs).arguments.items():
                given[key] = value.clone() if isinstance(value, Tensor) else value
            calls[name] = Call(given, None)

        def after(_: Any, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            calls[name].output = (
                tuple(_copied(part) for part in output) if isinstance(output, tuple) else _copied(output)
            )

        handles += [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
        ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
