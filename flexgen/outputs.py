"""vLLM's module of this name: only the import changes."""

from flexgen.runtime.requests.outputs import CompletionOutput, RequestOutput

__all__ = ["CompletionOutput", "RequestOutput"]
