"""Scripts as people write them for vLLM, with another import and nothing else changed."""

from __future__ import annotations

import json
import textwrap

import pytest
from tiny import reference, tiny_config

from tests.runtime.small_tokenizer import small_tokenizer

SCRIPTS = {
    "offline": """
        from vllm import LLM, SamplingParams
        prompts = ["the quick brown fox", "the lazy dog", "fox"]
        sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
        llm = LLM(model=MODEL, trust_remote_code=False, swap_space=4, gpu_memory_utilization=0.5, disable_log_stats=True,
                  tokenizer_mode="auto", limit_mm_per_prompt={"image": 0}, cpu_offload_gb=0, compilation_config={"mode": 3},
                  async_scheduling=True, max_lora_rank=16, dtype="float", max_model_len=64, max_logprobs=5, hf_overrides={})
        outputs = llm.generate(prompts, sampling_params)
        for prompt, output in zip(prompts, outputs):
            assert output.prompt == prompt and len(output.outputs[0].token_ids) <= 16
            print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")
        RESULT = [output.metrics.num_generation_tokens for output in outputs]
        assert all(o.metrics.queued_ts <= o.metrics.scheduled_ts <= o.metrics.first_token_ts <= o.metrics.last_token_ts for o in outputs)
    """,
    "chat": """
        from vllm import LLM
        llm = LLM(model=MODEL, max_model_len=64)
        sampling_params = llm.get_default_sampling_params()
        sampling_params.max_tokens = 5
        conversation = [{"role": "system", "content": "fox"}, {"role": "user", "content": "dog"}]
        (output,) = llm.chat(conversation, sampling_params, use_tqdm=False)
        outputs = llm.chat([conversation for _ in range(3)], sampling_params, use_tqdm=True)
        assert [o.prompt_token_ids for o in outputs] == [output.prompt_token_ids] * 3
        RESULT = sampling_params.temperature, sampling_params.top_k
    """,
    "engine_args": """
        from dataclasses import asdict
        from vllm import LLM, EngineArgs, SamplingParams
        from vllm.inputs import TextPrompt, TokensPrompt
        engine_args = EngineArgs(model=MODEL, max_model_len=64, max_num_seqs=4, enforce_eager=True)
        with LLM.from_engine_args(engine_args) as llm:
            llm.enqueue([TextPrompt(prompt="fox"), TokensPrompt(prompt_token_ids=[5, 6, 7])], SamplingParams(max_tokens=4))
            llm.enqueue("dog", SamplingParams(max_tokens=3))
            RESULT = [len(output.outputs[0].token_ids) for output in llm.wait_for_completion(use_tqdm=False)]
            assert llm.llm_engine.model_config.max_model_len == 64
    """,
    "beams": """
        from vllm import LLM
        from vllm.sampling_params import BeamSearchParams
        llm = LLM(model=MODEL, max_model_len=64)
        params = BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True)
        (output,) = llm.beam_search([{"prompt": "the quick"}], params)
        RESULT = [len(sequence.tokens) for sequence in output.sequences]
        assert output.sequences[0].text.startswith("<s>the quick")
    """,
    "structured": """
        import json
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import StructuredOutputsParams
        llm = LLM(model=MODEL, max_model_len=128)
        schema = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["age"],
                  "additionalProperties": False}
        params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema, disable_any_whitespace=True), temperature=0.0)
        RESULT = list(json.loads(llm.generate("fox", params, use_tqdm=False)[0].outputs[0].text))
        choice = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["fox", "dog"]), temperature=0.0)
        assert llm.generate("the", choice)[0].outputs[0].text in ("fox", "dog")
    """,
    "async": """
        import asyncio
        from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams
        from vllm.sampling_params import RequestOutputKind
        async def stream(engine, prompt, request_id):
            sampling_params = SamplingParams(max_tokens=6, temperature=0.8, seed=42, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
            tokens = []
            async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=sampling_params):
                tokens += output.outputs[0].token_ids
                if output.finished:
                    break
            return tokens
        async def main():
            engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=MODEL, enforce_eager=True, max_model_len=64))
            try:
                await engine.check_health()
                assert engine.is_running
                found = await asyncio.gather(*(stream(engine, "the fox", f"id-{n}") for n in range(3)))
            finally:
                engine.shutdown()
            assert not engine.is_running
            return found
        RESULT = [len(tokens) for tokens in asyncio.run(main())]
    """,
}  # fmt: skip
RESULTS = {"chat": (0.7, 11), "engine_args": [4, 4, 3], "structured": ["age"], "async": [6] * 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny Llama with a tokenizer and sampling defaults of its own."""
    from flexgen.verify.reference import save

    folder = tmp_path_factory.mktemp("model")
    tokenizer = small_tokenizer()
    tokenizer.save_pretrained(folder)
    save(reference(tiny_config("llama", vocab_size=len(tokenizer), max_position_embeddings=256)), folder)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "top_k": 11, "do_sample": True}))
    return str(folder)


@pytest.mark.parametrize("name", SCRIPTS)
def test_script(name, model):
    if name == "structured":
        pytest.importorskip("xgrammar")
    scope = {"MODEL": model}
    exec(textwrap.dedent(SCRIPTS[name]).replace("from vllm", "from flexgen"), scope)
    if name == "beams":
        assert len(set(scope["RESULT"])) == 1 and len(scope["RESULT"]) == 3
    elif name == "offline":
        assert all(1 <= count <= 16 for count in scope["RESULT"])
    else:
        assert scope["RESULT"] == RESULTS[name]
