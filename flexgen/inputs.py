"""vLLM's module of this name: only the import changes."""

from flexgen.runtime.requests.prompts import Prompt as PromptType
from flexgen.runtime.requests.prompts import TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
