"""vLLM's module of this name: only the import changes."""

from flexgen.runtime.beam_search import BeamSearchParams
from flexgen.runtime.requests.params import RequestOutputKind, SamplingParams, StructuredOutputsParams

__all__ = ["BeamSearchParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
