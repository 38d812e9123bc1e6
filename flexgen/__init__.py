"""flexgen: a compiler for language-model engines. A YAML spec in, readable PyTorch and an engine that serves it out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexgen.integrations.attach import attach, detach
    from flexgen.runtime.arguments import AsyncEngineArgs, EngineArgs
    from flexgen.runtime.async_engine import AsyncEngine
    from flexgen.runtime.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from flexgen.runtime.llm import LLM
    from flexgen.runtime.requests.outputs import CompletionOutput, GenerationError, Logprob, RequestOutput
    from flexgen.runtime.requests.params import LoRARequest, RequestOutputKind, SamplingParams, StructuredOutputsParams
    from flexgen.runtime.requests.prompts import TextPrompt, TokensPrompt

    AsyncLLMEngine = AsyncEngine

__version__ = "0.1.0"
_LAZY = {
    "flexgen.integrations.attach": ("attach", "detach"),
    "flexgen.runtime.arguments": ("AsyncEngineArgs", "EngineArgs"),
    "flexgen.runtime.async_engine": ("AsyncEngine", "AsyncLLMEngine"),
    "flexgen.runtime.beam_search": ("BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence"),
    "flexgen.runtime.llm": ("LLM",),
    "flexgen.runtime.requests.outputs": ("CompletionOutput", "GenerationError", "Logprob", "RequestOutput"),
    "flexgen.runtime.requests.params": ("LoRARequest", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"),
    "flexgen.runtime.requests.prompts": ("TextPrompt", "TokensPrompt"),
}
__all__ = [
    "LLM",
    "AsyncEngine",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EngineArgs",
    "GenerationError",
    "LoRARequest",
    "Logprob",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "attach",
    "detach",
]


def __getattr__(name: str) -> Any:
    """Load the runtime, and torch with it, only when it is asked for: the compiler needs neither."""
    import importlib

    for module, names in _LAZY.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module `flexgen` has no `{name}`")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
