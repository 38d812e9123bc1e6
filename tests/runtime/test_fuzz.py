"""Whatever a config.json or an argument holds ends in transformers' tokens or in a message of ours; never in a raw traceback.

A part of the cases runs with the suite, all of them with the marker `slow`.
"""

from __future__ import annotations

import copy
import json
import linecache
import math
import random
import shutil

import numpy as np
import pytest
import torch

from flexgen.errors import FlexgenError
from flexgen.runtime.llm import LLM
from flexgen.runtime.options import EngineOptions
from flexgen.runtime.requests.params import SamplingParams, StructuredOutputsParams
from tests.runtime.loading.test_real_models import oracle
from tests.runtime.small_tokenizer import small_tokenizer
from tests.runtime.toy import Toy
from tests.tiny import SOME, saved

torch.set_num_threads(1)
OURS = (FlexgenError, ValueError, TypeError, NotImplementedError)
SIZES = {"device": "cpu", "dtype": "float32", "max_num_seqs": 2, "num_gpu_blocks_override": 40, "max_model_len": 48, "block_size": 4}
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26]
NASTY = (None, True, False, 0, 1, -1, 2, 3, 7, 64, 10**6, 10**9, 10**12, 2**63, 10**400, 0.0, 0.5, -0.5, 1.5, 1e-30, 1e30, 1e308, math.inf,
         -math.inf, math.nan, "", "x", "1", "silu", "relu", "default", "full_attention", "x" * 5000, [], [1], [[]], [None], ["x"] * 4,
         {}, {"a": 1}, {"a": {"a": {}}}, [0, 1], [10**12])  # fmt: skip


def is_ours(error):
    """Raised on purpose by this project's code, and short enough to read."""
    trace = error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    where = trace.tb_frame.f_code.co_filename
    on_purpose = linecache.getline(where, trace.tb_lineno).strip().startswith("raise ")
    ours = on_purpose and ("/flexgen/" in where or "/generated/" in where)
    return isinstance(error, OURS) and ours and len(str(error)) < 4000


def places(node):
    keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    return [(node, key) for key in keys] + [place for key in keys for place in places(node[key])]


def mutate(raw, rng):
    """One or two changes: a field deleted, of another type, negative, huge, nested, or another field's value."""
    raw = copy.deepcopy(raw)
    for _ in range(rng.choice((1, 1, 2))):
        holder, key = rng.choice(places(raw))
        kind = rng.random()
        if kind < 0.15:
            del holder[key]
        elif kind < 0.3:
            other, name = rng.choice(places(raw))
            holder[key] = copy.deepcopy(other[name])
        else:
            holder[key] = copy.deepcopy(rng.choice(NASTY))
    return raw


def answer(folder):
    llm = LLM(folder, skip_tokenizer_init=True, **SIZES)
    (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    return output.outputs[0].token_ids


@torch.no_grad()
def is_theirs(folder, tokens):
    """Whether each token is transformers' most likely one, or it takes the file for no model at all."""
    from flexgen.verify.reference import load

    config = json.loads((folder / "config.json").read_text())
    if "longrope" in str(config.get("rope_parameters")):
        return True  # transformers chooses factors by the prompt's length, an engine by the longest one that it takes
    try:
        logits = load(folder, "cpu")(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
    except Exception:  # transformers' messages are of any kind
        return True
    behind = logits.max(-1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return bool((behind < 1e-4).all())  # a size of 1e30 makes them all alike


def config_case(spec, folder, seed):
    """-> whether we served it."""
    raw = json.loads((saved(spec)[1] / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(mutate(raw, random.Random(f"{spec} {seed}"))))
    try:
        got = answer(folder)
    except Exception as error:
        assert is_ours(error), (spec, seed, (folder / "config.json").read_text(), repr(error)[:300])
        return False
    assert is_theirs(folder, got), (spec, seed, (folder / "config.json").read_text())
    return True


def fuzz_configs(spec, tmp_path, seeds):
    folder = shutil.copytree(saved(spec)[1], tmp_path / "m")
    served = sum(config_case(spec, folder, seed) for seed in seeds)
    assert 0 < served < len(seeds)


BLIND = pytest.mark.xfail(reason="llama4's chunks follow no_rope_layers: a layer_types that disagrees passes unseen", strict=False)
CONFIGS = [pytest.param(spec, marks=BLIND) if spec == "llama4" else spec for spec in SOME]


@pytest.mark.parametrize("spec", CONFIGS)
def test_any_config(spec, tmp_path):
    fuzz_configs(spec, tmp_path, range(60))


@pytest.mark.slow
@pytest.mark.parametrize("spec", CONFIGS)
def test_any_config_at_length(spec, tmp_path):
    fuzz_configs(spec, tmp_path, range(60, 1500))


# ---------------------------------------------------------------- arguments

ODD = (*NASTY, np.int64(3), np.float32(0.5), np.array([1, 2]), torch.tensor([1]), torch.tensor(2), b"x", object(), print, len, range(3),
       {1: 2.0}, {5: -1}, {-1: 1}, {3: "x"}, {3: math.inf}, ("a", "b"), [""], ["fox"], ["fox", 3], [print], [lambda row: row],
       [lambda outputs, row: row], [lambda outputs, row: row * math.nan], [lambda outputs, row: row - math.inf], [1, 1, 1], [329],
       [330], [400], {329: 1.0}, {335: 1}, (n for n in (1, 2)), complex(1), 1e-6, SamplingParams, StructuredOutputsParams(regex="a"),
       StructuredOutputsParams(choice=["fox"]), StructuredOutputsParams(json={"type": "nonsense"}))  # fmt: skip


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    small_tokenizer().save_pretrained(folder)
    return LLM(Toy(vocab=340), tokenizer=folder, max_model_len=48, max_num_seqs=2, num_gpu_blocks_override=20, block_size=4)


def sampling_case(llm, seed):
    rng = random.Random(seed)
    names = list(SamplingParams.__dataclass_fields__)
    fields = {name: rng.choice(ODD) for name in rng.sample(names, rng.choice((1, 1, 2, 3)))}
    shown = {name: repr(value)[:60] for name, value in fields.items()}
    fields.setdefault("max_tokens", 4)
    try:
        (output,) = llm.generate([[1, 2, 3]], SamplingParams(**fields), use_tqdm=False)
    except Exception as error:
        assert is_ours(error), (seed, shown, repr(error)[:300])
        return False
    for completion in output.outputs:
        assert completion.finish_reason in ("stop", "length") or completion.error, (seed, shown)
        assert completion.logprobs is None or len(completion.logprobs) == len(completion.token_ids)
    metrics = llm.metrics()
    assert metrics["free_blocks"] == metrics["total_blocks"] and metrics["free_slots"] == metrics["total_slots"], (seed, shown)
    return True


def test_any_sampling_parameters(llm):
    assert 20 < sum(sampling_case(llm, seed) for seed in range(800)) < 700


@pytest.mark.slow
def test_any_sampling_parameters_at_length(llm):
    assert sum(sampling_case(llm, seed) for seed in range(800, 20_000)) > 0


def loading_case(seed):
    rng = random.Random(f"LLM {seed}")
    loading = ["dtype", "device", "load_format", "spec", "generated", "ignore_config", "allow_edited", "head_dtype", "tokenizer",
               "mamba_ssm_cache_dtype", "max_model_len", "enable_sleep_mode", "skip_tokenizer_init"]  # fmt: skip
    names = [*loading, *EngineOptions.names(), "quantization", "tensor_parallel_size", "nonsense"]
    changed = {name: rng.choice(ODD) for name in rng.sample(names, rng.choice((1, 1, 2)))}
    arguments = {**SIZES, "skip_tokenizer_init": True, **changed}
    shown = {name: repr(value)[:60] for name, value in changed.items()}
    try:
        made = LLM(saved("llama")[1], **arguments)
        (output,) = made.generate(PROMPT[:3], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), use_tqdm=False)
    except Exception as error:
        assert is_ours(error), (seed, shown, repr(error)[:300])
        return False
    assert output.outputs[0].token_ids == oracle(saved("llama")[0], PROMPT[:3], 2), (seed, shown)
    return True


def test_any_arguments_of_the_engine():
    assert 0 < sum(loading_case(seed) for seed in range(300)) < 300


@pytest.mark.slow
def test_any_arguments_of_the_engine_at_length():
    assert sum(loading_case(seed) for seed in range(300, 5000)) > 0
