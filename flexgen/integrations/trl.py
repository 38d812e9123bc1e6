"""TRL's trainers with flexgen as their generator, on one copy of the weights.

    from flexgen.integrations import trl as flexgen_trl

    flexgen_trl.install()                                    # `use_vllm=True, vllm_mode="colocate"` is flexgen now
    GRPOTrainer(model, args=GRPOConfig(use_vllm=True, vllm_mode="colocate", ...), ...)

or, with nothing of TRL replaced, for GRPO:

    GRPOTrainer(model, rollout_func=flexgen_trl.Rollouts(), ...)

Both share the trainer's parameters: a step of the optimizer is seen at once, and adapters of PEFT are merged again after each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any

from trl.data_utils import is_conversational
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from flexgen import CompletionOutput, RequestOutput, SamplingParams, StructuredOutputsParams
from flexgen.integrations.rollouts import RolloutEngine

TRAINERS = ("trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer")
"""Modules of TRL that make a `VLLMGeneration`."""

_options: dict[str, Any] = {}
_replaced: list[Callable[[], None]] = []


def install(**options: Any) -> None:
    """Let TRL's colocated generation be flexgen's until `uninstall`, whether vLLM is installed or not.

    options: arguments of `LLM.from_model`, before those that TRL gives: sizes are the larger of both.
    """
    uninstall()
    _options.update(options)
    names = {"SamplingParams": SamplingParams, "RequestOutput": RequestOutput, "StructuredOutputsParams": StructuredOutputsParams}
    for name, value in names.items():
        _replace(vllm_generation, name, value)
    for trainer in TRAINERS:
        _replace(import_module(trainer), "VLLMGeneration", Generation)


def uninstall() -> None:
    """Give TRL its own back. Trainers that were made keep their engines."""
    _options.clear()
    while _replaced:
        _replaced.pop()()


def _replace(module: Any, name: str, value: Any) -> None:
    if hasattr(module, name):
        own = getattr(module, name)
        _replaced.append(lambda: setattr(module, name, own))
    else:
        _replaced.append(lambda: delattr(module, name))
    setattr(module, name, value)


class Generation(VLLMGeneration):
    """What a trainer of TRL generates with: `sync_weights` and `generate` as TRL calls them, `llm` as it reads it."""

    def _init_vllm(self) -> None:
        refusals = (
            (self.mode != "colocate", "vllm_mode", self.mode, "flexgen runs in the trainer's process: 'colocate'"),
            (self.tensor_parallel_size != 1, "vllm_tensor_parallel_size", self.tensor_parallel_size, "each process has an engine: 1"),
            (self.enable_sleep_mode, "vllm_enable_sleep_mode", True, "the weights are the trainer's own; lower "
             "vllm_gpu_memory_utilization for pages that leave it more room"),
        )  # fmt: skip
        for refused, name, value, instead in refusals:
            if refused:
                raise NotImplementedError(f"{name}={value!r} is not supported: {instead}")
        self.generation_kwargs = _ended_by(self.generation_kwargs, _ends(self.model, self.processing_class))
        given = {"gpu_memory_utilization": self.gpu_memory_utilization, "seed": self.accelerator.process_index}
        self.llm = RolloutEngine(self.model, **given | _options)
        _need(self.llm, max_num_seqs=self.max_num_seqs, max_model_len=self.max_model_length)

    def sync_weights(self) -> None:
        """The engine reads the trainer's tensors: derive anew what is made of them."""
        self.llm.sync()


class Rollouts:
    """The `rollout_func` of a GRPOTrainer. The engine is built with the first batch, on the trainer's model.

    options: arguments of `LLM.from_model`; sizes are the larger of these and what the training arguments need.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.engine: RolloutEngine | None = None
        self._step: int | None = None

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Token ids of prompts and completions, and the completions' log-probabilities under what they were sampled from."""
        args = trainer.args
        if self.engine is None or self.engine.model is not trainer.model:
            self.engine = RolloutEngine(trainer.model, **{"seed": trainer.accelerator.process_index} | self.options)
            _need(self.engine, max_num_seqs=args.per_device_train_batch_size * args.steps_per_generation)
        elif self._step != trainer.state.global_step:
            self.engine.sync()
        self._step = trainer.state.global_step
        sampling = {
            "temperature": trainer.temperature, "top_p": trainer.top_p, "top_k": trainer.top_k, "min_p": trainer.min_p or 0.0,
            "repetition_penalty": trainer.repetition_penalty, "max_tokens": trainer.max_completion_length, "logprobs": 0,
        }  # fmt: skip
        extra = _ended_by(args.generation_kwargs or {}, _ends(trainer.model, trainer.processing_class))
        asked = [{"prompt_token_ids": ids} for ids in _tokenized(prompts, trainer)]
        outputs = self.engine.llm.generate(asked, SamplingParams(**sampling | extra), use_tqdm=False)
        answers = [output.outputs[0] for output in outputs]
        return {
            "prompt_ids": [output.prompt_token_ids for output in outputs],
            "completion_ids": [answer.token_ids for answer in answers],
            "logprobs": [_logprobs(answer) for answer in answers],
        }


def _logprobs(answer: CompletionOutput) -> list[float]:
    assert answer.logprobs is not None
    return [each[token].logprob for each, token in zip(answer.logprobs, answer.token_ids, strict=True)]


def _tokenized(prompts: Sequence[Any], trainer: Any) -> list[list[int]]:
    """Prompts as TRL would tokenize them: text as it is, conversations by the chat template."""
    tokenizer = trainer.processing_class
    if not is_conversational({"prompt": prompts[0]}):
        return tokenizer(text=list(prompts))["input_ids"]
    template = getattr(trainer, "chat_template", None)
    return tokenizer.apply_chat_template(
        conversation=list(prompts), tools=getattr(trainer, "tools", None) or None, chat_template=template, add_generation_prompt=True,
        tokenize=True, return_dict=True, **(getattr(trainer, "chat_template_kwargs", None) or {}),
    )["input_ids"]  # fmt: skip


def _ends(model: Any, processing_class: Any) -> list[int]:
    """The tokens that end an answer: the tokenizer's, and those of the model's generation config."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    found = (tokenizer.eos_token_id, getattr(getattr(model, "generation_config", None), "eos_token_id", None))
    listed = [ids if isinstance(ids, Iterable) else [ids] for ids in found if ids is not None]
    return sorted({int(token) for ids in listed for token in ids})


def _ended_by(arguments: dict[str, Any], ends: list[int]) -> dict[str, Any]:
    return arguments | {"stop_token_ids": sorted({*ends, *(arguments.get("stop_token_ids") or ())})}


def _need(engine: RolloutEngine, **sizes: int | None) -> None:
    engine.need(**{name: size for name, size in sizes.items() if size is not None})
