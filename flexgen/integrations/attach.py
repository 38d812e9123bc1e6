"""`flexgen.attach(model)`: a live model that generates by an engine on its own weights, called as trainers made for Unsloth call it."""

from __future__ import annotations

from typing import Any

from flexgen.integrations.rollouts import RolloutEngine
from flexgen.runtime.requests.outputs import RequestOutput


def attach(model: Any, **options: Any) -> Any:
    """Give a transformers model, or one wrapped by PEFT, an engine that is built with the first call. -> the model

    model.fast_generate(prompts, sampling_params, ...)   `LLM.generate` on the weights as they are now
    model.vllm_engine                                    the engine: an `LLM`
    model.load_lora(path, load_tensors=False)            a LoRARequest, where `enable_lora=True` gives requests their own adapter
    model.save_lora(path)                                the active adapter, as PEFT saves it

    options: arguments of `LLM.from_model`. With `enable_lora` the adapters of a PeftModel come with requests; else they are merged.
    Raises ValueError for a model that has an engine already.
    """
    if isinstance(getattr(model, "vllm_engine", None), RolloutEngine):
        raise ValueError("the model has an engine already: detach(model) first")
    engine = RolloutEngine(model, **options)

    def fast_generate(*args: Any, **kwargs: Any) -> list[RequestOutput]:
        engine.sync()  # an optimizer may have stepped since
        return engine.llm.generate(*args, **kwargs)

    model.vllm_engine, model.fast_generate = engine, fast_generate
    model.load_lora = lambda *args, **kwargs: engine.llm.load_lora(*args, **kwargs)
    model.save_lora = lambda *args, **kwargs: engine.llm.save_lora(*args, **kwargs)
    return model


def detach(model: Any) -> Any:
    """Take the engine away; the model keeps its weights. -> the model"""
    for name in ("vllm_engine", "fast_generate", "load_lora", "save_lora"):
        model.__dict__.pop(name, None)
    return model
