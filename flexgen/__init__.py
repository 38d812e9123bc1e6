"""flexgen: a compiler for language-model engines. A YAML spec in, readable PyTorch and an engine that serves it out."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
_LAZY = {
    "AsyncEngine": "flexgen.runtime.async_engine",
    "CompletionOutput": "flexgen.runtime.requests.outputs",
    "GenerationError": "flexgen.runtime.requests.outputs",
    "LLM": "flexgen.runtime.llm",
    "Logprob": "flexgen.runtime.requests.outputs",
    "LoRARequest": "flexgen.runtime.requests.params",
    "RequestOutput": "flexgen.runtime.requests.outputs",
    "RequestOutputKind": "flexgen.runtime.requests.params",
    "SamplingParams": "flexgen.runtime.requests.params",
    "StructuredOutputsParams": "flexgen.runtime.requests.params",
}
__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "GenerationError",
    "LoRARequest",
    "Logprob",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Load the runtime, and torch with it, only when it is asked for: the compiler needs neither."""
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module `flexgen` has no `{name}`")
