"""`flexgen.LLM`: vLLM's offline interface on this engine."""

from __future__ import annotations

import itertools
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from flexgen.contract.json_files import shown
from flexgen.errors import ConfigError
from flexgen.runtime.engine import Engine
from flexgen.runtime.execution import regional
from flexgen.runtime.garbage import few_collections
from flexgen.runtime.loading.merging import AdapterUpdate
from flexgen.runtime.loading.rope import checked_length, stretched_length
from flexgen.runtime.loading.updates import Source, Update
from flexgen.runtime.options import EngineOptions
from flexgen.runtime.report import memory_report
from flexgen.runtime.requests.outputs import GenerationError, RequestOutput
from flexgen.runtime.requests.params import LoRARequest, RequestOutputKind
from flexgen.runtime.requests.prompts import Params, Prompt, params_list, parse_prompt, prompt_list
from flexgen.runtime.requests.request import RequestGroup
from flexgen.runtime.requests.templates import options
from flexgen.runtime.requests.tokens import Tokens
from flexgen.runtime.served import ServedModel

log = logging.getLogger(__name__)

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "quantization": (None,),
    "trust_remote_code": (False,),
    "distributed_executor_backend": (None, "external_launcher", "uni"),
    "model_impl": ("auto", "vllm"),
    "enable_lora": (False,),
    "enable_chunked_prefill": (None, True),
    "kv_cache_dtype": ("auto",),
    "disable_log_stats": (True, False),
}
"""Arguments of vLLM's LLM that are accepted with these values, which change nothing here; others are refused."""


class LLM:
    """A model in this process. See docs/parameters.md for every argument; one that is not supported raises by name.

    `model` is a Hugging Face directory, or a loaded Model (then the arguments about loading must be left out).
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | ServedModel,
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        skip_tokenizer_init: bool = False,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        load_format: str | None = None,
        spec: str | os.PathLike[str] | None = None,
        generated: str | os.PathLike[str] | None = None,
        ignore_config: Sequence[str] = (),
        allow_edited: bool = False,
        head_dtype: str | torch.dtype | None = None,
        mamba_ssm_cache_dtype: str | None = None,
        max_model_len: int | None = None,
        enable_sleep_mode: bool = False,
        **options: Any,
    ) -> None:
        _refuse_unknown(options)
        _check_paths(spec=spec, generated=generated, tokenizer=tokenizer)
        _check_reachable(model=model, generated=generated, tokenizer=tokenizer)
        _check_names(load_format=load_format, mamba_ssm_cache_dtype=mamba_ssm_cache_dtype)
        _check_flags(skip_tokenizer_init=skip_tokenizer_init, allow_edited=allow_edited, enable_sleep_mode=enable_sleep_mode)
        if enable_sleep_mode:
            raise NotImplementedError("enable_sleep_mode=True is not supported yet")
        nothing = isinstance(ignore_config, tuple) and not ignore_config
        loading = {"dtype": dtype, "device": device, "load_format": load_format, "spec": spec,
                   "generated": generated, "head_dtype": head_dtype, "ignore_config": None if nothing else ignore_config,
                   "allow_edited": allow_edited or None, "mamba_ssm_cache_dtype": mamba_ssm_cache_dtype}  # fmt: skip
        on_cuda = torch.cuda.is_available() and str(device or "cuda").startswith("cuda")
        if on_cuda and not options.get("enforce_eager"):
            regional.prepare()  # reading the weights takes longer
        self.model = _load(model, {name: value for name, value in loading.items() if value is not None})
        self._directory = self.model.directory
        source = None if skip_tokenizer_init else Path(tokenizer) if tokenizer else self._directory
        tokens = Tokens.load(source, self._directory, self.model.config, self.model.dims.vocab)
        sizes = {name: value for name, value in options.items() if name not in _NEUTRAL and value is not None}
        self.llm_engine = Engine(self.model, tokens, EngineOptions(_max_model_len(self.model, max_model_len), **sizes))
        self._requests = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
        timeout: float | None = None,
        raise_on_error: bool = False,
    ) -> list[RequestOutput]:
        """Answer all prompts, in their order. One SamplingParams for all, or one each.

        `timeout` is in seconds for each request; one that runs out ends with finish_reason "abort". One that fails while
        it runs (NaN logits, a logits processor that raises) ends with "error" and says why, and the others go on; with
        `raise_on_error` GenerationError is raised at the end, which holds all outputs. Raises ValueError for a prompt or
        parameter that cannot be served, before anything runs. Interrupted, it frees all that it held.
        """
        groups = self._add_all(prompts, sampling_params, lora_request, timeout)
        try:
            with _Progress(groups, use_tqdm) as progress, few_collections():
                while any(not group.finished for group in groups):
                    self.llm_engine.step()
                    progress.update()
        finally:
            self._abort_all(groups)
        outputs = [group.output() for group in groups]
        _report_errors([group.error for group in groups if group.error], outputs, raise_on_error)
        return outputs

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Params | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
        chat_template: str | os.PathLike[str] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        raise_on_error: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, through the tokenizer's chat template (it writes BOS, once)."""
        if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
            raise TypeError(f"messages is a list of messages, or of such lists; got {messages!r}")
        conversations: Any = messages if messages and isinstance(messages[0], list | tuple) else [messages]
        explicit = {"chat_template": chat_template, "tools": tools, "add_generation_prompt": add_generation_prompt,
                    "continue_final_message": continue_final_message}  # fmt: skip
        template = options(explicit, chat_template_kwargs)
        prompts = [
            {"prompt_token_ids": self.llm_engine.tokens.chat(conversation, **template)}
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm, lora_request, timeout, raise_on_error)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | None = None,
        lora_request: LoRARequest | None = None,
        timeout: float | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield a RequestOutput each time a request has grown, the last with `finished`. Closing it aborts the rest.

        Nothing happens, and no error is raised, before the first output is asked for. A request that fails while it runs
        ends with finish_reason "error" and says why.
        """
        groups = self._add_all(prompts, sampling_params, lora_request, timeout)
        seen = dict.fromkeys(groups, 0)
        try:
            while seen:
                if all(group.version == version for group, version in seen.items()):
                    self.llm_engine.step()
                for group in [group for group, version in seen.items() if group.version != version]:
                    seen[group] = group.version
                    if group.finished:
                        del seen[group]
                    if group.finished or group.params.output_kind is not RequestOutputKind.FINAL_ONLY:
                        yield group.output()
        finally:
            self._abort_all(groups)

    def get_tokenizer(self) -> Any:
        return self.llm_engine.tokens.require("get_tokenizer")

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix. Always succeeds (True), as vLLM's does when nothing runs."""
        self.llm_engine.reset_prefix_cache()
        return True

    def load_weights(self, source: Source, on_running: str = "wait") -> Update:
        """Write new weights in place: pairs of Hugging Face name and tensor, all or some, or a checkpoint's directory.
        -> tensors by role. See docs/weights.md.

        on_running: answers that a stream still grows are finished first ("wait"), aborted ("abort"), or an error ("raise").
        Raises UpdateError or CheckpointError for what does not fit.
        """
        return self.llm_engine.load_weights(source, on_running)

    def reload_weights(self, on_running: str = "wait") -> Update:
        """Read the weights from the model's directory again."""
        if self._directory is None:
            raise NotImplementedError("reload_weights reads the directory that a model was loaded from, and this one has none")
        return self.load_weights(self._directory, on_running)

    def weights_changed(self, on_running: str = "wait") -> Counter[str]:
        """To be called after the trainer changed tensors that it shares through `from_model`, once an optimizer's step."""
        return self.llm_engine.weights_changed(on_running)

    def load_adapter(self, adapter: Any, name: str | None = None, config: Any = None, on_running: str = "wait") -> AdapterUpdate:
        """Merge a LoRA adapter: a PEFT directory, a live PeftModel's active adapters (or its one called `name`), or a mapping
        of tensors with its LoraConfig. -> modules that are changed, by role. See docs/adapters.md.

        Only weights that it touches are copied, and the pristine ones stay what they are. Raises AdapterError for what does not
        fit, and then changes nothing.
        """
        return self.llm_engine.load_adapter(adapter, name, config, on_running)

    def refresh_adapter(
        self, name: str | None = None, adapter: Any = None, config: Any = None, on_running: str = "wait"
    ) -> AdapterUpdate:
        """Read a merged adapter again after it changed, from the pristine weights; `name` may be left out of the only one."""
        return self.llm_engine.refresh_adapter(name, adapter, config, on_running)

    def unload_adapter(self, name: str | None = None, on_running: str = "wait") -> AdapterUpdate:
        """Take a merged adapter out: the pristine weights, bit for bit, where no other changes them."""
        return self.llm_engine.unload_adapter(name, on_running)

    @classmethod
    def from_model(cls, model: Any, *, spec: str | None = None, generated: str | os.PathLike[str] | None = None,
                   ignore_config: Sequence[str] = (), head_dtype: torch.dtype | None = None, **arguments: Any) -> LLM:  # fmt: skip
        """An engine on the weights of a live transformers model, PEFT's included: one copy, which both read.

        The model's parameters become views of the engine's storage; call `weights_changed()` after each optimizer step.
        `arguments` are those of `LLM`. Raises SharingError for a tensor that cannot be shared, before anything is changed.
        """
        from flexgen.runtime.loading.sharing import share

        shared = share(model, spec=spec, generated=generated, ignore_config=ignore_config, head_dtype=head_dtype)
        arguments.setdefault("skip_tokenizer_init", arguments.get("tokenizer") is None)
        llm = cls(shared.model, **arguments)
        llm.llm_engine.shared = shared
        return llm

    def metrics(self) -> dict[str, int | float]:
        """Numbers since start, and what is free now. docs/parameters.md lists them."""
        return self.llm_engine.all_metrics()

    def report(self) -> str:
        """For people: bytes of pages and state by group, token and slot, the seconds of the start, how decode runs."""
        return memory_report(self.llm_engine)

    def _add_all(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | None,
        lora_request: LoRARequest | None,
        timeout: float | None,
    ) -> list[RequestGroup]:
        """Queue every prompt, or raise for the first that cannot be served and queue none."""
        if lora_request is not None:
            raise NotImplementedError("lora_request is not supported yet")
        parsed = [parse_prompt(prompt, self.llm_engine.tokens) for prompt in prompt_list(prompts)]
        params = params_list(sampling_params, len(parsed), self.llm_engine.admission.check_params)
        groups: list[RequestGroup] = []
        complete = False
        try:
            for (text, ids), each in zip(parsed, params):
                request_id = str(next(self._requests))
                groups.append(self.llm_engine.add(request_id, ids, each, text, timeout, checked=True))
            complete = True
        finally:
            if not complete:
                self._abort_all(groups)
        return groups

    def _abort_all(self, groups: Sequence[RequestGroup]) -> None:
        for group in groups:
            self.llm_engine.abort(group)


def _report_errors(errors: Sequence[str], outputs: list[RequestOutput], raises: bool) -> None:
    if errors and raises:
        raise GenerationError(f"{len(errors)} of {len(outputs)} prompts failed: {errors[0]}", outputs)
    if errors:
        log.warning('%d of %d prompts ended with finish_reason "error": %s', len(errors), len(outputs), errors[0])


def _refuse_unknown(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if name in _NEUTRAL:
            if not any(value is allowed or (type(value) is type(allowed) and value == allowed) for allowed in _NEUTRAL[name]):
                allowed = " or ".join(repr(each) for each in _NEUTRAL[name])
                raise NotImplementedError(f"{name}={shown(value)} is not supported; only {allowed}")
        elif name not in EngineOptions.names():
            near = get_close_matches(name, [*EngineOptions.names(), *_NEUTRAL], n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise TypeError(f"LLM has no argument {name!r}; {hint}docs/parameters.md lists those it has")


def _check_paths(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None and (not isinstance(value, str | os.PathLike) or not str(value) or "\0" in str(value)):
            raise TypeError(f"{name} is {shown(value)}, and must be a name or path")


def _check_reachable(**arguments: Any) -> None:
    """Raises ValueError for a folder that the system does not even look for: too long a name, or in one that is closed."""
    for name, value in arguments.items():
        try:
            if isinstance(value, str | os.PathLike):
                Path(value, "config.json").exists()
        except OSError as error:
            raise ValueError(f"{name} is {shown(value)}, and cannot be looked for: {error.strerror}") from None


def _check_names(**arguments: Any) -> None:
    for name, value in arguments.items():
        if not isinstance(value, str | None):
            raise TypeError(f"{name} is {shown(value)}, and must be a name")


def _check_flags(**arguments: Any) -> None:
    for name, value in arguments.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {shown(value)}, and must be True or False")


def _load(model: str | os.PathLike[str] | ServedModel, loading: Mapping[str, Any]) -> ServedModel:
    if not isinstance(model, str | os.PathLike):
        if not hasattr(model, "dims"):
            raise TypeError(f"model is the directory of a checkpoint, or a loaded Model; got {model!r}")
        if loading:
            raise ValueError(f"{', '.join(loading)} say how to load a model, and this one is loaded already")
        return model
    from flexgen.runtime.loading.model import Model

    return Model.load(Path(model), **loading)


def _max_model_len(model: ServedModel, wanted: int | None) -> int:
    longest = checked_length(model.config)
    if longest is None:
        if wanted is None:
            raise ConfigError("config.json has no max_position_embeddings; give LLM(max_model_len=...)")
        return wanted
    stretched = stretched_length(model.config, longest)
    if isinstance(wanted, int) and wanted > stretched:
        scaled = f", which its rope stretches to {stretched}" if stretched > longest else ""
        raise ValueError(f"max_model_len={wanted} is more than the model's max_position_embeddings={longest}{scaled}")
    return longest if wanted is None else wanted


class _Progress:
    """A bar of finished requests, where `shown`."""

    def __init__(self, groups: Sequence[RequestGroup], shown: bool) -> None:
        self._groups, self._bar, self._done = groups, None, 0
        if shown and groups:
            from tqdm import tqdm

            self._bar = tqdm(total=len(groups), desc="Generating", unit="prompt")

    def __enter__(self) -> _Progress:
        return self

    def update(self) -> None:
        if self._bar is not None:
            done = sum(group.finished for group in self._groups)
            self._bar.update(done - self._done)
            self._done = done

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()
