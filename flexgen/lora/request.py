"""vLLM's module of this name: only the import changes."""

from flexgen.runtime.requests.params import LoRARequest

__all__ = ["LoRARequest"]
