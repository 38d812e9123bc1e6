"""vLLM's package of this name: only the import changes."""
