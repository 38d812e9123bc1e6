"""`flexgen.LLM`: vLLM's offline interface on this engine."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self, Unpack

import torch

from flexgen.errors import FlexgenError
from flexgen.runtime import arguments
from flexgen.runtime.arguments import EngineArgs
from flexgen.runtime.beam_search import BeamSearchOutput, BeamSearchParams, search
from flexgen.runtime.engine import Engine
from flexgen.runtime.execution import regional
from flexgen.runtime.garbage import few_collections
from flexgen.runtime.loading.lora import AdapterError
from flexgen.runtime.loading.merging import AdapterUpdate
from flexgen.runtime.loading.updates import Source, Update
from flexgen.runtime.options import EngineOptions, Options
from flexgen.runtime.report import memory_report
from flexgen.runtime.requests.generation import generation_defaults
from flexgen.runtime.requests.outputs import GenerationError, RequestOutput
from flexgen.runtime.requests.params import LoRARequest, RequestOutputKind, SamplingParams
from flexgen.runtime.requests.prompts import Loras, Params, Prompt, lora_list, params_list, parse_prompt, prompt_list
from flexgen.runtime.requests.request import RequestGroup
from flexgen.runtime.requests.templates import options
from flexgen.runtime.requests.tokens import Tokens
from flexgen.runtime.served import ServedModel
from flexgen.runtime.surface import REFUSED_METHODS, refusal

log = logging.getLogger(__name__)

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
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        download_dir: str | os.PathLike[str] | None = None,
        hf_token: str | bool | None = None,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        load_format: str | None = None,
        spec: str | os.PathLike[str] | None = None,
        generated: str | os.PathLike[str] | None = None,
        ignore_config: Sequence[str] = (),
        hf_overrides: Mapping[str, Any] | None = None,
        allow_edited: bool = False,
        head_dtype: str | torch.dtype | None = None,
        mamba_ssm_cache_dtype: str | None = None,
        max_model_len: int | None = None,
        chat_template: str | os.PathLike[str] | None = None,
        generation_config: str | os.PathLike[str] = "auto",
        override_generation_config: Mapping[str, Any] | None = None,
        compilation_config: int | Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> None:
        sizes = arguments.engine_options(options, compilation_config)
        arguments.check_flags(skip_tokenizer_init=skip_tokenizer_init, allow_edited=allow_edited)
        arguments.check_names(load_format=load_format, mamba_ssm_cache_dtype=mamba_ssm_cache_dtype, revision=revision,
                              tokenizer_revision=tokenizer_revision)  # fmt: skip
        arguments.check_paths(spec=spec, generated=generated, tokenizer=tokenizer, download_dir=download_dir,
                              chat_template=chat_template, generation_config=generation_config)  # fmt: skip
        arguments.check_reachable(model=model, generated=generated, tokenizer=tokenizer)
        nothing = isinstance(ignore_config, tuple) and not ignore_config
        loading = {"dtype": dtype, "device": device, "load_format": load_format, "spec": spec, "generated": generated,
                   "head_dtype": head_dtype, "ignore_config": None if nothing else ignore_config, "hf_overrides": hf_overrides or None,
                   "allow_edited": allow_edited or None, "mamba_ssm_cache_dtype": mamba_ssm_cache_dtype}  # fmt: skip
        hub = arguments.Hub(revision, tokenizer_revision, download_dir, hf_token)
        on_cuda = torch.cuda.is_available() and str(device or "cuda").startswith("cuda")
        if on_cuda and not options.get("enforce_eager"):
            regional.prepare()  # reading the weights takes longer
        self.model = arguments.load(model, hub, {name: value for name, value in loading.items() if value is not None})
        self._directory = self.model.directory
        source = None if skip_tokenizer_init else hub.tokenizer(tokenizer) if tokenizer else self._directory
        tokens = Tokens.load(source, self._directory, self.model.config, self.model.dims.vocab)
        longest = arguments.longest(self.model, max_model_len)
        self._engine: Engine | None = Engine(self.model, tokens, EngineOptions(longest, **sizes))
        self._defaults = generation_defaults(self._directory, generation_config, override_generation_config)
        self._chat_template = chat_template
        self._requests = itertools.count()
        self._queued: list[RequestGroup] = []
        self._trained: Any = None
        self._last_lora = 0

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """An engine of the arguments that an `EngineArgs` holds."""
        return cls(engine_args.model, **engine_args.arguments)

    @property
    def llm_engine(self) -> Engine:
        """The engine itself. Raises FlexgenError once this is closed."""
        if self._engine is None:
            raise FlexgenError("this LLM is closed")
        return self._engine

    def close(self) -> None:
        """End what runs, and let go of weights, pages and graphs. Also at the end of `with LLM(...) as llm:`."""
        if self._engine is not None:
            self._engine.abort_all()
            self._engine = None
            del self.model
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        """What vLLM's LLM has and this one has not says so by name when it is called."""
        return refusal("LLM", name, REFUSED_METHODS)

    def get_default_sampling_params(self) -> SamplingParams:
        """What answers are drawn with where a call gives no parameters: those of the model's generation_config.json."""
        return SamplingParams(**self._defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | None = None,
        use_tqdm: bool = True,
        lora_request: Loras = None,
        priority: Sequence[int] | None = None,
        timeout: float | None = None,
        raise_on_error: bool = False,
    ) -> list[RequestOutput]:
        """Answer all prompts, in their order. One SamplingParams for all, or one each.

        `priority`, one for each prompt, needs scheduling_policy="priority": lower ones run first.

        `timeout` is in seconds for each request; one that runs out ends with finish_reason "abort". One that fails while
        it runs (NaN logits, a logits processor that raises) ends with "error" and says why, and the others go on; with
        `raise_on_error` GenerationError is raised at the end, which holds all outputs. Raises ValueError for a prompt or
        parameter that cannot be served, before anything runs. Interrupted, it frees all that it held.
        """
        return self._finish(self._add_all(prompts, sampling_params, lora_request, timeout, priority), use_tqdm, raise_on_error)

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | None = None,
        lora_request: Loras = None,
        priority: Sequence[int] | None = None,
    ) -> list[str]:
        """Queue prompts, which `wait_for_completion` answers. -> their request ids"""
        groups = self._add_all(prompts, sampling_params, lora_request, None, priority)
        self._queued += groups
        return [group.request_id for group in groups]

    def wait_for_completion(self, use_tqdm: bool = True) -> list[RequestOutput]:
        """Answer all that was queued, in that order."""
        queued, self._queued = self._queued, []
        return self._finish(queued, use_tqdm, raises=False)

    def _finish(self, groups: Sequence[RequestGroup], use_tqdm: bool, raises: bool) -> list[RequestOutput]:
        try:
            with _Progress(groups, use_tqdm) as progress, few_collections():
                while any(not group.finished for group in groups):
                    self.llm_engine.step()
                    progress.update()
        finally:
            self._abort_all(groups)
        outputs = [group.output() for group in groups]
        _report_errors([group.error for group in groups if group.error], outputs, raises)
        return outputs

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Params | None = None,
        use_tqdm: bool = True,
        lora_request: Loras = None,
        chat_template: str | os.PathLike[str] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        raise_on_error: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, through the tokenizer's chat template (it writes BOS, once)."""
        prompts = self._chat_prompts(
            messages, chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs
        )
        return self.generate(prompts, sampling_params, use_tqdm, lora_request, None, timeout, raise_on_error)

    def enqueue_chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Params | None = None,
        lora_request: Loras = None,
        chat_template: str | os.PathLike[str] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Queue conversations as `enqueue` does prompts."""
        prompts = self._chat_prompts(
            messages, chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs
        )
        return self.enqueue(prompts, sampling_params, lora_request)

    def _chat_prompts(
        self,
        messages: Any,
        chat_template: str | os.PathLike[str] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> list[Prompt]:
        if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
            raise TypeError(f"messages is a list of messages, or of such lists; got {messages!r}")
        conversations: Any = messages if messages and isinstance(messages[0], list | tuple) else [messages]
        explicit = {"chat_template": chat_template or self._chat_template, "tools": tools, "add_generation_prompt": add_generation_prompt,
                    "continue_final_message": continue_final_message}  # fmt: skip
        template = options(explicit, chat_template_kwargs)
        return [{"prompt_token_ids": self.llm_engine.tokens.chat(each, **template)} for each in conversations]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | None = None,
        lora_request: Loras = None,
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

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: Loras = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The best answers to each prompt that a beam search finds; `concurrency_limit` prompts are searched at once."""
        tokens = self.llm_engine.tokens
        parsed = [parse_prompt(prompt, tokens)[1] for prompt in prompt_list(prompts)]
        at_once = len(parsed) if concurrency_limit is None else concurrency_limit
        if at_once < 1 and parsed:
            raise ValueError(f"concurrency_limit={concurrency_limit} is out of range: it must be at least 1")

        def generate(ids: list[list[int]], one: SamplingParams) -> list[RequestOutput]:
            return self.generate([{"prompt_token_ids": each} for each in ids], one, use_tqdm, lora_request, raise_on_error=True)

        found: list[BeamSearchOutput] = []
        for start in range(0, len(parsed), at_once):
            found += search(parsed[start : start + at_once], params, generate, frozenset(tokens.eos_ids), tokens.vocab)
        return found if tokens.tokenizer is None else [each.with_text(partial(tokens.decode, skip_special=False)) for each in found]

    def get_tokenizer(self) -> Any:
        return self.llm_engine.tokens.require("get_tokenizer")

    def get_world_size(self, include_dp: bool = True) -> int:
        """Devices of this engine: 1."""
        return 1

    def reset_mm_cache(self) -> None:
        """Nothing to forget: prompts hold no images."""

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix. Always succeeds (True), as vLLM's does when nothing runs."""
        self.llm_engine.reset_prefix_cache()
        return True

    def load_weights(self, source: Source, on_running: str = "wait") -> Update:
        """Write new weights in place: pairs of Hugging Face name and tensor, all or some, or a checkpoint's directory.
        -> tensors by role. See docs/weights.md.

        on_running: answers that a stream still grows are finished first ("wait"), aborted ("abort"), go on with the new weights
        ("pause"), or are an error ("raise").
        Raises UpdateError or CheckpointError for what does not fit.
        """
        return self.llm_engine.load_weights(source, on_running)

    def reload_weights(self, on_running: str = "wait") -> Update:
        """Read the weights from the model's directory again."""
        if self._directory is None:
            raise NotImplementedError("reload_weights reads the directory that a model was loaded from, and this one has none")
        return self.load_weights(self._directory, on_running)

    def receive_weights(self, source: int, group: Any = None, on_running: str = "wait") -> Update:
        """Take the weights that another process broadcasts with `flexgen.runtime.loading.remote.send_weights`, over
        torch.distributed: bucketed, checked at both ends before a tensor is sent, counted. See docs/weights.md.
        """
        return self.llm_engine.receive_weights(source, group, on_running)

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

    def save_lora(self, save_directory: str | os.PathLike[str]) -> None:
        """Write the adapters of the PeftModel that `from_model` was given, as PEFT does."""
        self._peft_model("save_lora").save_pretrained(save_directory)

    def load_lora(self, save_directory: str | os.PathLike[str], load_tensors: bool = False) -> LoRARequest:
        """A request for an adapter as it is now: the directory's, or with `load_tensors` the active ones of the PeftModel that
        `from_model` was given, whose directory only names it then. Each call makes an adapter with a number of its own.
        """
        engine, name = self.llm_engine, os.fspath(save_directory)
        number = self._last_lora = max(self._last_lora, *engine.list_loras(), 0) + 1
        source = {"lora_model": self._peft_model("load_lora(load_tensors=True)")} if load_tensors else {"lora_path": name}
        request = LoRARequest(name, number, **source)
        engine.add_lora(request)
        return request

    def _peft_model(self, what: str) -> Any:
        if not hasattr(self._trained, "peft_config"):
            raise AdapterError(f"{what} needs a live PeftModel: make the engine with LLM.from_model(peft_model)")
        return self._trained

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
        llm.llm_engine.shared, llm._trained = shared, model
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
        lora_request: Loras,
        timeout: float | None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestGroup]:
        """Queue every prompt, or raise for the first that cannot be served and queue none."""
        parsed = [parse_prompt(prompt, self.llm_engine.tokens) for prompt in prompt_list(prompts)]
        adapters = lora_list(lora_request, len(parsed))
        sampling_params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = params_list(sampling_params, len(parsed), self.llm_engine.admission.check_params)
        priorities = self.llm_engine.admission.check_priorities(priority, len(parsed))
        groups: list[RequestGroup] = []
        complete = False
        try:
            for (text, ids), each, first, lora in zip(parsed, params, priorities, adapters):
                request_id = str(next(self._requests))
                groups.append(self.llm_engine.add(request_id, ids, each, text, timeout, True, first, lora))
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


class _Progress:
    """A bar of finished requests and tokens a second, where `shown`."""

    def __init__(self, groups: Sequence[RequestGroup], shown: bool) -> None:
        self._groups, self._bar, self._done = groups, None, 0
        if shown and groups:
            from tqdm import tqdm

            self._bar, self._began = tqdm(total=len(groups), desc="Generating", unit="prompt"), time.perf_counter()

    def __enter__(self) -> _Progress:
        return self

    def update(self) -> None:
        if self._bar is not None:
            done = sum(group.finished for group in self._groups)
            if done != self._done:
                made = sum(request.produced for group in self._groups for request in group.requests)
                self._bar.set_postfix_str(f"{made / (time.perf_counter() - self._began):.1f} tokens/s", refresh=False)
                self._bar.update(done - self._done)
                self._done = done

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()
