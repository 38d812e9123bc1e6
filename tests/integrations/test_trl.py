"""TRL's own trainers on a CPU: rollouts of the weights that train, and logprobs that the trainer finds again."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runtime.small_tokenizer import small_tokenizer

from tests.tiny import reference, tiny_config

pytest.importorskip("trl")

from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from flexgen import LLM, SamplingParams
from flexgen.errors import FlexgenError
from flexgen.integrations import trl as flexgen_trl

PROMPTS = ["the quick brown fox", "the", "jumps over the lazy dog and", "naive", "over", "fox fox fox", "lazy", "a"]
LORA = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)


@pytest.fixture(autouse=True)
def given_back():
    yield
    flexgen_trl.uninstall()


def model(seed=0):
    tokenizer = small_tokenizer()
    made = reference(tiny_config("llama", vocab_size=len(tokenizer), max_position_embeddings=128), seed)
    made.generation_config.eos_token_id, made.generation_config.pad_token_id = tokenizer.eos_token_id, tokenizer.eos_token_id
    return made


def reward(completions, **_):
    """An answer is the better the more often it says `e`."""
    return [float(text.count("e")) for text in completions]


def trainer(tmp_path, way, lora, kind=GRPOTrainer, config=GRPOConfig, **changes):
    """A trainer whose rollouts are flexgen's, by one of the two ways."""
    tokenizer = small_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    if way == "install":
        flexgen_trl.install(block_size=8)
    colocated = {"use_vllm": True, "vllm_mode": "colocate"} if way == "install" else {}
    fields = {"max_steps": 2, "learning_rate": 1e-2, "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8,
              "report_to": [], "logging_steps": 1, "save_strategy": "no", "use_cpu": True, "bf16": False, "beta": 0.0,
              "gradient_checkpointing": False}  # fmt: skip
    args = config(output_dir=str(tmp_path), **fields | colocated | changes)
    extra = {"rollout_func": flexgen_trl.Rollouts(block_size=8)} if way == "rollout_func" else {}
    return kind(model=model(), args=args, processing_class=tokenizer, reward_funcs=reward, peft_config=LoraConfig(**LORA) if lora else None,
                train_dataset=Dataset.from_dict({"prompt": PROMPTS}), **extra)  # fmt: skip


def engine(made):
    return made.vllm_generation.llm if made.use_vllm else made.rollout_func.engine


def greedy(llm):
    (output,) = llm.generate([{"prompt_token_ids": [5, 9, 30, 41]}], GREEDY, use_tqdm=False)
    answer = output.outputs[0]
    return answer.token_ids, [each[token].logprob for each, token in zip(answer.logprobs, answer.token_ids)]


def difference(rollouts, trained):
    """The largest between the logprobs of rollouts and those of a training forward of the same weights."""
    found = []
    for prompt, completion, logprobs in zip(rollouts["prompt_ids"], rollouts["completion_ids"], rollouts["logprobs"], strict=True):
        with torch.no_grad():
            logits = trained(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
        found.append((wanted - torch.tensor(logprobs)).abs().max().item())
    return max(found)


WAYS = [("install", False), ("install", True), ("rollout_func", False), ("rollout_func", True)]


@pytest.mark.parametrize(("way", "lora"), WAYS)
def test_a_grpo_step_finds_the_logprobs_of_its_rollouts(way, lora, tmp_path):
    """And after the last step the engine is that of the merged weights, on one copy of them."""
    made = trainer(tmp_path, way, lora, max_steps=3)
    before = {name: tensor.clone() for name, tensor in made.model.named_parameters()}
    found = []
    if way == "rollout_func":  # TRL compares only what vLLM's place gave it
        own = made.rollout_func
        made.rollout_func = lambda prompts, trainer: (output := own(prompts, trainer), found.append(difference(output, trainer.model)))[0]
    made.train()
    if way == "rollout_func":
        made.rollout_func = own
    else:
        found = [entry["sampling/sampling_logp_difference/mean"] for entry in made.state.log_history if "reward" in entry]
    assert len(found) == 3 and max(found) < 1e-4
    trained = {name for name, tensor in made.model.named_parameters() if not torch.equal(tensor, before[name])}
    assert trained and all("lora_" in name for name in trained) == lora
    engine(made).sync()  # the step after the last rollout
    got = greedy(engine(made))
    merged = made.model.merge_and_unload() if lora else made.model
    merged.save_pretrained(tmp_path / "merged")
    fresh = LLM(tmp_path / "merged", dtype="float32", device="cpu", skip_tokenizer_init=True, max_model_len=64, block_size=8)
    wanted = greedy(fresh)
    assert got[0] == wanted[0] and got[1] == pytest.approx(wanted[1], abs=2e-5)


def test_the_engine_has_no_weights_of_its_own(tmp_path):
    made = trainer(tmp_path, "install", False)
    llm = engine(made).llm
    shared = {tensor.untyped_storage().data_ptr() for tensor in made.model.parameters()}
    served = llm.llm_engine.model
    assert {served.stored(layer, weight).untyped_storage().data_ptr() for layer, weight, _ in served.storages()} == shared
    assert engine(made).options["max_num_seqs"] == 4 and llm.llm_engine.options.block_size == 8


@pytest.mark.parametrize("lora", [False, True])
def test_a_step_that_learns_nothing_changes_no_bit(lora, tmp_path):
    made = trainer(tmp_path, "install", lora, learning_rate=0.0)
    before = greedy(engine(made))
    made.train()
    assert greedy(engine(made)) == before


@pytest.mark.parametrize("lora", [False, True])
def test_rloo(lora, tmp_path):
    made = trainer(tmp_path, "install", lora, RLOOTrainer, RLOOConfig)
    made.train()
    assert sum("reward" in entry for entry in made.state.log_history) == 2
    assert engine(made).llm.metrics()["generated_tokens"] > 0


def test_answers_end_with_the_token_that_ended_them(tmp_path):
    made = trainer(tmp_path, "install", False, generation_kwargs={"stop_token_ids": [40]})
    _, completions, logprobs, _ = made.vllm_generation.generate([[5, 9, token] for token in range(60, 100)], None, 1)
    ends = {made.processing_class.eos_token_id, 40}
    ended = [ids for ids in completions if len(ids) < 8]
    assert ended and all(ids[-1] in ends and not ends & set(ids[:-1]) for ids in ended)
    assert [len(each) for each in logprobs] == [len(ids) for ids in completions]


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"vllm_mode": "server"}, "vllm_mode='server'"), ({"vllm_enable_sleep_mode": True}, "vllm_enable_sleep_mode=True")],
)
def test_what_is_not_served_is_refused_by_name(changes, message, tmp_path):
    with pytest.raises(NotImplementedError, match=message):
        trainer(tmp_path, "install", False, **changes)


def test_sizes_follow_the_training_arguments_and_a_built_engine_does_not_grow(tmp_path):
    made = trainer(tmp_path, "install", False, vllm_max_model_length=64, steps_per_generation=2)
    assert (engine(made).options["max_num_seqs"], engine(made).options["max_model_len"]) == (8, 64)
    assert engine(made).llm.llm_engine.model_config.max_model_len == 64
    with pytest.raises(FlexgenError, match="built with max_model_len=64, and 65 are needed: pass max_model_len=65"):
        engine(made).need(max_model_len=65)


def test_trl_is_as_it_was_after_uninstall():
    from trl.generation import vllm_generation
    from trl.trainer import grpo_trainer

    own, names = grpo_trainer.VLLMGeneration, set(vars(vllm_generation))
    flexgen_trl.install()
    flexgen_trl.install(block_size=8)
    assert grpo_trainer.VLLMGeneration is flexgen_trl.Generation
    flexgen_trl.uninstall()
    assert grpo_trainer.VLLMGeneration is own and set(vars(vllm_generation)) == names and "vllm" not in sys.modules


@pytest.mark.slow
def test_two_processes_have_an_engine_each(tmp_path):
    """Under torchrun, over gloo: both train on rollouts of their own, and end with the same weights, which their engines read."""
    root = Path(__file__).parents[2]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={port}", __file__, str(tmp_path)]
    paths = os.pathsep.join([str(root), str(root / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    assert first["rollouts"] != second["rollouts"] and first["greedy"] == second["greedy"]
    assert max(first["differences"]) < 1e-4 and first["weights"].equal(second["weights"])


def one_rank(folder):
    """What each process of that test does."""
    made = trainer(Path(folder) / "trained", "install", False, max_steps=2)
    rollouts, own = [], made.vllm_generation.generate
    made.vllm_generation.generate = lambda *args, **kwargs: (found := own(*args, **kwargs), rollouts.append(found[1]))[0]
    made.train()
    engine(made).sync()
    logged = [entry["sampling/sampling_logp_difference/mean"] for entry in made.state.log_history if "reward" in entry]
    tokens, _ = greedy(engine(made))
    weights = torch.cat([tensor.flatten() for tensor in made.model.parameters()]).detach()
    found = {"rollouts": rollouts, "greedy": tokens, "differences": logged or [0.0], "weights": weights}
    torch.save(found, Path(folder) / f"rank{made.accelerator.process_index}.pt")


if __name__ == "__main__":
    one_rank(sys.argv[1])
