"""An engine for a model that trains: on its weights, built at first use, brought up to date when told."""

from __future__ import annotations

from typing import Any

from flexgen.errors import FlexgenError
from flexgen.runtime.llm import LLM

SIZES = ("max_num_seqs", "max_model_len")


class RolloutEngine:
    """`LLM.from_model(model, **options)`, made when it is first used: whatever it lacks is the engine's.

    model    a transformers model, or a PeftModel, whose active adapters are merged into shadows of what they touch
    options  arguments of `LLM.from_model`; with `enable_lora` requests bring the adapters, and none is merged
    """

    def __init__(self, model: Any, **options: Any) -> None:
        self.model, self.options = model, options
        self._llm: LLM | None = None

    @property
    def merges(self) -> bool:
        return hasattr(self.model, "peft_config") and not self.options.get("enable_lora")

    @property
    def llm(self) -> LLM:
        """The engine. Raises SharingError for weights that it cannot share."""
        if self._llm is None:
            llm = LLM.from_model(self.model, **self.options)
            if self.merges:
                llm.load_adapter(self.model)
            self._llm = llm
        return self._llm

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.llm, name)

    def need(self, **sizes: int) -> None:
        """Sizes that a caller needs at least. Larger ones that were given stay.

        Raises FlexgenError for an engine that was built smaller, which does not grow.
        """
        for name, size in sizes.items():
            given = self.options.get(name)
            if given is not None and given >= size:
                continue
            if self._llm is not None:
                raise FlexgenError(f"the engine was built with {name}={given}, and {size} are needed: pass {name}={size}")
            self.options[name] = size

    def sync(self) -> None:
        """After the trainer changed its weights: merge its adapters again, and use nothing that was made of the old ones."""
        if self._llm is None:
            return
        if self.merges:
            self._llm.refresh_adapter(adapter=self.model)
        else:
            self._llm.weights_changed()
