"""The bytes of a decode step, against sums worked out by hand from each shape, and the shapes themselves."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from flexgen.bench.bound import H200_BYTES_PER_SECOND, StepBytes, step_bytes
from flexgen.bench.shapes import LOADING, SHAPES, shape
from flexgen.contract.configs import normalise
from flexgen.errors import ConfigError
from flexgen.runtime.loading.model import Model
from flexgen.runtime.loading.package import choose, find_packages, load_package

ROWS, BF16, FP32 = 3, 2, 4


def without_storage(name, layers=None):
    """The model of a shape with tensors that have sizes and no memory."""
    config = shape(name, layers)
    package = load_package(choose(config))
    config = normalise(config, package.manifest["text_config"])
    model = Model(package, package.walker.Dims.from_config(config, ()), config, torch.bfloat16, torch.device("meta"))
    if "mamba_ssm_cache_dtype" in LOADING.get(name, {}):
        model.set_state_dtype(getattr(torch, LOADING[name]["mamba_ssm_cache_dtype"]))
    return model


def by_hand():
    """name: (layers, context, experts touched, weights that every step reads, weights of one expert, K/V and state a row)"""
    llama = 2 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096 + 2 * 4096) + 4096 + 128256 * 4096
    yield "llama-8b", 2, 1000, None, llama + ROWS * 4096, 0, 2 * 2 * 1000 * 8 * 128 * BF16, 0

    qwen3 = 2 * (2 * 4096 * 2560 + 2 * 1024 * 2560 + 2 * 128 + 3 * 9728 * 2560 + 2 * 2560) + 2560 + 151936 * 2560
    yield "qwen3-4b", 2, 1000, None, qwen3, 0, 2 * 2 * 1000 * 8 * 128 * BF16, 0  # the head, which is tied, is all of it

    attention = 2 * 4096 * 2048 + 2 * 512 * 2048 + 2 * 128
    moe = 2 * (attention + 128 * 2048 + 2 * 2048) + 2048 + 151936 * 2048 + ROWS * 2048
    yield "qwen3-30b-a3b", 2, 1000, 10.5, moe, 2 * 3 * 768 * 2048, 2 * 2 * 1000 * 4 * 128 * BF16, 0

    attention = 4096 * 2880 + 4096 + 2 * (512 * 2880 + 512) + 2880 * 4096 + 2880 + 64
    oss = 2 * (attention + 32 * 2880 + 32 + 2 * 2880) + 2880 + 201088 * 2880 + ROWS * 2880
    expert = 2 * (2880 * 5760 + 5760 + 2880 * 2880 + 2880)
    yield "gpt-oss-20b", 2, 1000, 10.5, oss, expert, 2 * (128 + 1000) * 8 * 64 * BF16, 0

    sliding = 2 * 4096 * 2816 + 2 * 2048 * 2816 + 2 * 256
    full = 2 * 8192 * 2816 + 1024 * 2816 + 2 * 512  # values are the keys' projection
    rest = 3 * 2112 * 2816 + 7 * 2816 + 1 + 128 * 2816 + 2816 + 128
    gemma = 5 * sliding + full + 6 * rest + 2816 + 262144 * 2816
    pages = 2 * (5 * 1024 * 8 * 256 + 4000 * 2 * 512) * BF16
    yield "gemma4-26b-a4b", 6, 4000, 10.5, gemma, 6 * 3 * 704 * 2816, pages, 0

    linear = (2 * 2048 + 4096) * 2048 + 4096 * 2048 + 2 * 32 * 2048 + 8192 * 4 + 2 * 32 + 128 + 2048 * 4096
    full = 2 * 4096 * 2048 + 2 * 512 * 2048 + 2048 * 4096 + 2 * 256
    rest = 256 * 2048 + 3 * 512 * 2048 + 2048 + 2 * 2048
    qwen = 3 * linear + full + 4 * rest + 2048 + 248320 * 2048 + ROWS * 2048
    state = 3 * (8192 * 4 * BF16 + 32 * 128 * 128 * FP32)
    yield "qwen3.6-35b-a3b", 4, 1000, 10.5, qwen, 4 * 3 * 512 * 2048, 2 * 1000 * 2 * 256 * BF16, state
    state = 3 * (8192 * 4 + 32 * 128 * 128) * BF16
    yield "qwen3.6-35b-a3b-bf16-state", 4, 1000, 10.5, qwen, 4 * 3 * 512 * 2048, 2 * 1000 * 2 * 256 * BF16, state


@pytest.mark.parametrize("name, layers, context, touched, dense, expert, pages, state", by_hand(), ids=list(SHAPES))
def test_bytes_of_a_step_are_those_worked_out_by_hand(name, layers, context, touched, dense, expert, pages, state):
    found = step_bytes(without_storage(name, layers), ROWS, context, touched)
    assert found == StepBytes(dense * BF16, int(expert * (touched or 0)) * BF16, ROWS * pages, ROWS * state)
    assert found.total == found.dense + found.experts + found.pages + found.state


def test_a_full_size_model_is_bound_by_its_weights():
    """Llama 3.1 8B has 8,030,261,248 parameters, and a token reads one row of the embedding's 128256."""
    read = step_bytes(without_storage("llama-8b"), 1, 0, None)
    assert read.total == BF16 * (8_030_261_248 - 128255 * 4096)
    assert H200_BYTES_PER_SECOND / read.total == pytest.approx(276, abs=1)


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_served_by_exactly_one_package(name):
    chosen, serving = choose(shape(name)), []
    for package in map(load_package, find_packages().values()):
        try:
            package.walker.Dims.from_config(normalise(shape(name), package.manifest["text_config"]), ())
        except ConfigError:
            continue
        serving.append(package.folder)
    assert serving == [chosen.resolve()]


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_the_parameters_of_transformers_model(name):
    config = shape(name)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    model = without_storage(name)
    ours = sum(getattr(layer, weight.role).numel() for layer, weight, _ in model.storages())
    scalars = sum(hasattr(layer, "layer_scalar") for layer in model.layers)  # a buffer there
    assert ours == sum(parameter.numel() for parameter in theirs.parameters()) + scalars


def test_names_and_depths_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="no model 'llama-9b' to measure; there are llama-8b, qwen3-4b"):
        shape("llama-9b")
    for layers in (0, -1, 33):
        with pytest.raises(ValueError, match=f"layers={layers} is out of range: llama-8b has 1 to 32"):
            shape("llama-8b", layers)
    shape("gpt-oss-20b")["layer_types"].append("more")
    assert len(SHAPES["gpt-oss-20b"]["layer_types"]) == 24
