"""Every spec decodes through all Triton kernels together, on a host through Triton's interpreter, as transformers does.

The interpreter must be chosen before Triton is first imported, so one test runs this file again in a process of its own.
There the operators' implementations for CUDA serve tensors on the host.
"""

import os
import subprocess
import sys

import pytest
import torch

torch.set_num_threads(1)

if os.environ.get("TRITON_INTERPRET") != "1":

    @pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
    def test_under_the_interpreter(which):
        command = [sys.executable, "-m", "pytest", "-q", "-m", which, __file__]
        result = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr

else:
    from flexgen.runtime.ops import library

    def on_host(name, *, cpu, cuda, fake, mutates=()):
        as_defined(name, cpu=cuda, cuda=cuda, fake=fake, mutates=mutates)

    as_defined, library.define_op = library.define_op, on_host
    from flexgen import LLM, SamplingParams
    from flexgen.contract.abi import PAD_SLOT
    from flexgen.runtime.execution import tables_kernel
    from flexgen.runtime.execution.tables import SlotTables
    from flexgen.runtime.ops import elementwise as ops
    from flexgen.runtime.ops import expert_backends, experts
    from flexgen.runtime.ops.kernels import linear
    from flexgen.runtime.sampling import kernel, sampler

    ops.project = lambda x_TD, weight_OD, bias_O=None: torch.ops.flexgen.linear(x_TD, weight_OD, bias_O)
    linear.serves = lambda x_TD, weight_OD: x_TD.shape[0] <= 64
    experts._takes_reference = lambda x_TD: False
    expert_backends.BACKENDS = (
        (lambda x_TD, weights, gate: expert_backends._kernels_know(gate), expert_backends.routed),
        (lambda x_TD, weights, gate: True, expert_backends.each),
    )
    sampler.finish_on = lambda device: kernel.finish
    SlotTables.rows = lambda mine, slots: tables_kernel.rows(slots, mine.last_S, mine.length_S)
    SlotTables.places = lambda mine, slots, group, size: tables_kernel.places(
        slots, mine.length_S, mine.blocks_SB[group], size
    )
    SlotTables.advance = lambda mine, slots, tokens: tables_kernel.advance(
        slots, tokens, mine.last_S, mine.length_S, PAD_SLOT
    )

    from tiny import SPECS, expected, prompt, saved

    few = ("gemma4_e", "gemma4_moe", "gpt_oss", "llama", "qwen3_5_moe")  # every kernel and every form of it
    slow = [pytest.param(spec, marks=pytest.mark.slow) for spec in SPECS if spec not in few]

    @pytest.mark.parametrize("spec", [*few, *slow])
    def test_greedy_tokens_are_those_of_transformers(spec):
        """One row, then rows of different lengths, through prompts and decode."""
        reference, folder = saved(spec)
        sizes = {"max_model_len": 32, "max_num_seqs": 2, "block_size": 8, "num_gpu_blocks_override": 20}
        llm = LLM(str(folder), device="cpu", dtype="float32", skip_tokenizer_init=True, **sizes)
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        for prompts in ([prompt(1)], [prompt(9), prompt(2)]):
            for ids, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False)):
                tokens = output.outputs[0].token_ids
                logits = expected(reference, ids + tokens[:-1])
                assert tokens == logits[len(ids) - 1 :].argmax(-1).tolist()
