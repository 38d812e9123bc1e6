"""A GRPO loop with LoRA on one GPU: rollouts by an engine on the trainer's weights, and by transformers' own generate.

    python -m benchmarks.grpo [--shape qwen3-4b] [--answers 64] [--prompt 256] [--new 256] [--steps 3] [--json out.json] [--tiny]

Random weights at real shapes, a reward drawn at random: it measures time and memory, not learning. Each way is a process of its own, since
peaks of memory are. TRL is not needed: the loop is that of GRPO without a reference model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import torch
from torch import Tensor

from flexgen import SamplingParams, attach
from flexgen.bench.shapes import SHAPES

TINY = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 512, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def trained(config: dict[str, Any], device: str) -> Any:
    """A model with random weights and an adapter of rank 16 on all linear modules."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {name: value for name, value in config.items() if name not in ("dtype", "architectures")}
    torch.manual_seed(0)
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.bfloat16)
    model = get_peft_model(made, LoraConfig(r=16, lora_alpha=32, target_modules=TARGETS))
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    return model.eval()


def logprobs_of(model: Any, ids: Tensor, prompt: int) -> Tensor:
    """Logprobs of the tokens after the prompt, (rows, new) in fp32."""
    logits = model(ids, logits_to_keep=ids.shape[1] - prompt + 1).logits[:, :-1]
    return logits.float().log_softmax(-1).gather(2, ids[:, prompt:, None])[..., 0]


def learn(model: Any, optimizer: torch.optim.Optimizer, rows: Tensor, prompt: int, old: Tensor | None) -> float:
    """One step of GRPO, four answers at a time. -> mean |difference| of rollouts' logprobs and the trainer's, nan without any"""
    model.train()
    advantages = torch.randn(len(rows), device=rows.device)
    differences = []
    for at in range(0, len(rows), 4):
        part = slice(at, at + 4)
        new = logprobs_of(model, rows[part], prompt)
        if old is not None:
            differences.append((new.detach() - old[part]).abs().mean().item())
        ratio = (new - new.detach()).exp()
        (-(ratio * advantages[part, None]).mean() * len(new) / len(rows)).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    return sum(differences) / len(differences) if differences else float("nan")


def measured(way: str, given: argparse.Namespace) -> dict[str, Any]:
    """Seconds of rollouts, of bringing the engine up to date and of learning, by step; peak memory."""
    device = "cpu" if given.tiny else "cuda"
    model = trained(SHAPES[given.shape] | (TINY if given.tiny else {}), device)
    weights = sum(tensor.nbytes for tensor in model.parameters())
    optimizer = torch.optim.AdamW([tensor for tensor in model.parameters() if tensor.requires_grad], lr=1e-5)
    vocab = model.config.vocab_size
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    if way == "flexgen":
        longest = given.prompt + given.new
        pages = given.answers * -(-longest // 16) + 8
        attach(model, max_model_len=longest, max_num_seqs=given.answers, num_gpu_blocks_override=pages)
    steps = []
    for step in range(given.steps):
        prompts = torch.randint(0, vocab, (given.answers, given.prompt), generator=torch.Generator().manual_seed(step))
        wait()
        started, old, sync = time.perf_counter(), None, 0.0
        if way == "flexgen":
            model.vllm_engine.sync()
            wait()
            sync = time.perf_counter() - started
            params = SamplingParams(temperature=1.0, max_tokens=given.new, ignore_eos=True, logprobs=0, detokenize=False)
            asked = [{"prompt_token_ids": row} for row in prompts.tolist()]
            outputs = [output.outputs[0] for output in model.vllm_engine.generate(asked, params, use_tqdm=False)]
            answers = torch.tensor([output.token_ids for output in outputs])
            old = torch.tensor([[each[token].logprob for each, token in zip(o.logprobs, o.token_ids)] for o in outputs], device=device)
            rows = torch.cat((prompts, answers), 1).to(device)
        else:
            length = {"min_new_tokens": given.new, "max_new_tokens": given.new}
            asked = {"input_ids": prompts.to(device), "attention_mask": torch.ones_like(prompts, device=device)}
            with torch.no_grad():
                rows = model.generate(**asked, **length, do_sample=True, temperature=1.0, top_k=0, pad_token_id=0)
        wait()
        rolled = time.perf_counter()
        difference = learn(model, optimizer, rows, given.prompt, old)
        wait()
        steps.append({"sync": sync, "rollout": rolled - started - sync, "learn": time.perf_counter() - rolled, "difference": difference})
    last = steps[-1]
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return {"way": way, "shape": given.shape, "answers": given.answers, "prompt": given.prompt, "new": given.new, "steps": steps,
            "tokens_per_second": given.answers * given.new / last["rollout"], "weights_gib": weights / 2**30, "peak_gib": peak / 2**30,
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "torch": torch.__version__}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-4b", choices=SHAPES)
    for name, default in (("--answers", 64), ("--prompt", 256), ("--new", 256), ("--steps", 3)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--json")
    parser.add_argument("--tiny", action="store_true", help="a model of two small layers on the host")
    parser.add_argument("--way", choices=("flexgen", "transformers"), help="measure one way in this process")
    given = parser.parse_args()
    if given.way:
        print(json.dumps(measured(given.way, given)))
        return
    found = []
    for way in ("flexgen", "transformers"):
        command = [sys.executable, "-m", "benchmarks.grpo", *sys.argv[1:], "--way", way]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
        last = found[-1]["steps"][-1]
        speed, peak, weights = (found[-1][name] for name in ("tokens_per_second", "peak_gib", "weights_gib"))
        print(f"{way}: {speed:.0f} tokens/s of rollouts, sync {1000 * last['sync']:.1f} ms, learning {last['learn']:.2f} s, "
              f"peak {peak:.1f} GiB of which weights {weights:.1f}, logprobs differ by {last['difference']:.1e}; "
              f"first rollout {found[-1]['steps'][0]['rollout']:.1f} s", flush=True)  # fmt: skip
    if given.json:
        with open(given.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
