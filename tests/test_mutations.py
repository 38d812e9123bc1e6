"""Leave one term out of a spec, and parity with transformers must break: nothing in it is decoration."""

from __future__ import annotations

import json
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import expected, prompt, reference, tiny_config

from flexgen.assets import root
from flexgen.contract.configs import look
from flexgen.ir.resolve import resolve
from flexgen.render.build import write
from flexgen.render.render import render
from flexgen.runtime.loading.checkpoint import CheckpointError
from flexgen.runtime.loading.model import Model
from flexgen.spec.load import load_spec, parse_spec
from flexgen.verify.harness import Harness

ATTENTION_NORM = ", {norm: rms, weight: post_attention_layernorm}]"
ONE_NORM = "[{norm: rms, weight: pre_feedforward_layernorm}, mlp, {norm: rms, weight: post_feedforward_layernorm}]"
PARALLEL = """  - add:
      - sum:
          - [{norm: ln, weight: input_layernorm}, attention]
          - [{norm: ln, weight: post_attention_layernorm}, mlp]"""
ONE_AFTER_THE_OTHER = """  - add: [{norm: ln, weight: input_layernorm}, attention]
  - add: [{norm: ln, weight: post_attention_layernorm}, mlp]"""
MUTATIONS = {
    "input norm": ("gemma4_dense", "add: [{norm: rms, weight: input_layernorm}, ", "add: ["),
    "post-attention norm": ("gemma4_dense", ATTENTION_NORM, "]"),
    "pre-feedforward norm": ("gemma4_dense", ONE_NORM, "[mlp, {norm: rms, weight: post_feedforward_layernorm}]"),
    "post-feedforward norm": ("gemma4_dense", ONE_NORM, "[{norm: rms, weight: pre_feedforward_layernorm}, mlp]"),
    "q norm": ("gemma4_dense", "q_norm: rms, ", ""),
    "k norm": ("gemma4_dense", "k_norm: rms, ", ""),
    "v norm": ("gemma4_dense", "v_norm: bare}", "v_norm: none}"),
    "layer scalar": ("gemma4_dense", "  - {gain: layer_scalar, size: 1", "  - {scale: 1.0"),
    "softcap": ("gemma4_dense", "tied: tied, softcap: softcap}", "tied: tied}"),
    "embedding scale": ("gemma4_dense", "scale: sqrt(hidden), scale_dtype: model}", "scale: 1.5}"),
    "softmax scale": ("gemma4_dense", "scale: 1.0,", "scale: 0.9,"),
    "value from key": ("gemma4_dense", "value: from_key,", "value: projected,"),
    "window": ("gemma4_dense", "window: window, scale", "window: window + 1, scale"),
    "rope of full layers": ("gemma4_dense", "rope: full, window", "rope: none, window"),
    "rope of sliding layers": ("gemma4_dense", "head_dim: head_dim, rope: sliding", "head_dim: head_dim, rope: none"),
    "norm after the MLP": ("gemma4_moe", "mlp, {norm: rms, weight: post_feedforward_layernorm_1}]", "mlp]"),
    "norm before the experts": ("gemma4_moe", "[{norm: rms, weight: pre_feedforward_layernorm_2}, moe", "[moe"),
    "norm after the experts": ("gemma4_moe", "moe, {norm: rms, weight: post_feedforward_layernorm_2}]", "moe]"),
    "norm of the sum": ("gemma4_moe", "      - {norm: rms, weight: post_feedforward_layernorm}\n", ""),
    "router norm": ("gemma4_moe", "{norm: bare}, {gain: router.scale}", "{gain: router.scale}"),
    "router scale": ("gemma4_moe", "{gain: router.scale}, ", ""),
    "router factor": ("gemma4_moe", ", {scale: 1 / sqrt(hidden)}", ""),
    "router reads stream": ("gemma4_moe", "      reads: stream\n", ""),
    "per-expert scale": ("gemma4_moe", "      gain: router.per_expert_scale\n", ""),
    "renormalise": ("gemma4_moe", "      normalise: true\n", ""),
    "per-layer scale": ("gemma4_e", ", scale: sqrt(input_size), scale_dtype: model}", "}"),
    "context scale": ("gemma4_e", " {scale: 1 / sqrt(hidden)},", ""),
    "context norm": ("gemma4_e", ", {norm: rms, weight: per_layer_projection_norm}]", "]"),
    "sum scale": ("gemma4_e", "      - {scale: 1 / sqrt(2)}\n", ""),
    "input gate's act": ("gemma4_e", "      - {act: gelu_tanh}\n", ""),
    "input product": ("gemma4_e", "      - {times: per_layer}\n", "      - {times: per_layer}\n      - {times: per_layer}\n"),
    "input norm of the branch": ("gemma4_e", "      - {norm: rms, weight: post_per_layer_input_norm}\n", ""),
    "bias of the choice": ("glm4_moe", "      choice_bias: mlp.gate.e_score_correction_bias\n", ""),
    "groups": ("glm4_moe", "      groups: {count: groups, keep: kept_groups, rank: best_two}\n", ""),
    "rank of groups": ("glm4_moe", "rank: best_two}", "rank: best}"),
    "kept groups": ("glm4_moe", "keep: kept_groups,", "keep: kept_groups + 1,"),
    "score": ("glm4_moe", "score: sigmoid", "score: softmax"),
    "normalised weights": ("glm4_moe", "      normalise: renormalise\n      normalise_eps: 1e-20\n", ""),
    "epsilon of their sum": ("glm4_moe", "normalise_eps: 1e-20", "normalise_eps: 0.1"),
    "floor of their sum": ("glm4_moe", "normalise_eps: 1e-20", "normalise_floor: 4"),
    "factor on the routed": ("glm4_moe", "      scale: routed_scale\n", ""),
    "shared experts": ("glm4_moe", "{feed_forward: [moe, shared]}", "{feed_forward: moe}"),
    "dense first layers": ("glm4_moe", "    - {first: first_k_dense_replace, kind: dense}\n", ""),
    "an empty slot": ("glm4_moe", "dense: {feed_forward: mlp}", "dense: {feed_forward: none}"),
    "norms by a flag": ("glm4_moe", "kind: bare}\n    - {all: true, kind: normed,", "kind: normed}\n    - {all: true, kind: bare,"),
    "weights on the input": ("mixtral", "    act: silu\n    router", "    act: silu\n    weights_on: input\n    router"),
    "a window that may be none": ("mixtral", "rope: rope, window: window}", "rope: rope}"),
    "the mean of a layer norm": ("starcoder2", "ln: {kind: layer, bias: true, eps: eps}", "ln: {kind: rms, eps: eps}"),
    "the bias of a layer norm": ("starcoder2", "kind: layer, bias: true,", "kind: layer,"),
    "a gain of one plus": ("nemotron", "gain: one_plus, ", ""),
    "norms of the whole q and k": ("olmo2", ",\n     qk_norm_over: projection}", "}"),
    "norms with weights of each head": ("cohere", ", qk_norm_over: head_weights}", "}"),
    "norms after rope": ("hunyuan_v1_dense", "qk_norm_when: after_rope,", ""),
    "a gate of its own": ("afmoe", ",\n     gate: {weight: self_attn.gate_proj, act: sigmoid}}", "}"),
    "a gate's activation": ("afmoe", "act: sigmoid}}", "act: softplus}}"),
    "rope in pairs": ("ernie4_5", ", layout: pairs", ""),
    "heads packed group by group": ("gpt_neox", "packed: groups", "packed: rows"),
    "a transposed module": ("gpt2", '"h.*.attn.c_proj", ', ""),
    "learned positions": ("opt", ", positions: {weight: embed_positions, length: positions, offset: 2}", ""),
    "the offset of positions": ("opt", "length: positions, offset: 2}", "length: positions + 1, offset: 1}"),
    "biases by distance": ("bloom", "alibi: 1, ", ""),
    "the norm of embedded tokens": ("bloom", ", norm: {norm: ln, weight: word_embeddings_layernorm}", ""),
    "relu squared": ("nemotron", "size: size, act: relu2", "size: size, act: relu"),
    "xielu": ("apertus", "size: size, act: xielu", "size: size, act: silu"),
    "gelu_new": ("gpt2", "size: size, act: gelu_new", "size: size, act: quick_gelu"),
    "layers without positions": ("smollm3", "bare: {like: rotary, rope: none}", "bare: {like: rotary, bias: false}"),
    "queries scaled by position": ("ministral3", ",\n     query_scale: {beta: query_beta, length: query_length}}", "}"),
    "the offset of that scale": ("llama4", "offset: 1, ", ""),
    "a clamp": ("olmoe", "clip: clip, clip_when: after_norms,", ""),
    "a clamp after norms": ("olmoe", "clip_when: after_norms,", ""),
    "chunks": ("llama4", "chunk: chunk, bias", "bias"),
    "a cap on scores": ("gemma2", "softcap: score_cap, ", ""),
    "a factor on scores": ("granite", "scale: score_factor, ", ""),
    "a factor on branches": ("granite", "mlp, {scale: branch_factor}]", "mlp]"),
    "a factor on logits": ("granite", ", scale: logit_factor}", "}"),
    "a factor on embedded tokens": ("granite", ", scale: embedding_factor}", "}"),
    "a bias of the head": ("phimoe", ", bias: head_bias}", "}"),
    "a gate on the shared expert": ("qwen2_moe", ", out_gate: mlp.shared_expert_gate}", "}"),
    "sparsemixer": ("phimoe", "after_top_k: sparsemixer, jitter: jitter}", "after_top_k: softmax}"),
    "weights on what experts read": ("llama4", "    weights_on: input\n", ""),
    "a floor of the sum": ("ernie4_5_moe", "      normalise_floor: norm_floor\n", ""),
    "values of another width": ("mimo_v2_flash", "value_dim: value_dim, ", ""),
    "a factor on values": ("mimo_v2_flash", "value_scale: value_scale,", "value_scale: 2 * value_scale,"),
    "sinks": ("mimo_v2_flash", ", sinks: self_attn.attention_sink_bias}", "}"),
    "parallel branches": ("gpt_neox", PARALLEL, ONE_AFTER_THE_OTHER),
}


EPS = 0.1
"""Large, so that a factor before a norm shows too: with a tiny epsilon the norm would take it out again."""


@cache
def saved(spec: str) -> tuple[Any, Path]:
    eps = load_spec(root("specs") / f"{spec}.yaml").model.dims["eps"]
    oracle = reference(tiny_config(spec, **({eps: EPS} if eps.isidentifier() else {})))
    folder = Path(tempfile.mkdtemp(prefix=f"flexgen-mutation-{spec}-"))
    oracle.save_pretrained(folder)
    return oracle, folder


def load(folder: Path, package: Path) -> Model:
    """A checkpoint with a mutated package, which may leave unread what the whole one reads."""
    config = json.loads((folder / "config.json").read_text())
    unread = [name for name in reads(root("generated") / package.name) - reads(package) if look(config, name) is not None]
    return Model.load(folder, dtype="float32", device="cpu", generated=package, ignore_config=unread, allow_edited=True)


def reads(package: Path) -> set[str]:
    """The config fields that a package reads."""
    lines = [line for line in (package / "walker.py").read_text().splitlines() if "config." in line]
    return {name for line in lines for name in re.findall(r'"([a-z_0-9.]+)"', line)}


@pytest.mark.parametrize("spec", ["gemma4_dense", "gemma4_e", "gemma4_moe", "glm4_moe", "mixtral"])
def test_the_whole_spec_has_parity(spec):
    oracle, folder = saved(spec)
    got = Harness(load(folder, root("generated") / spec)).feed({0: prompt(40)})[0]
    assert (got - expected(oracle, prompt(40))).abs().max() < 1e-4


_NAMES = list(MUTATIONS)
FIRST = _NAMES[: _NAMES.index("the mean of a layer norm")]
"""Of specs that have most words; the others, a spec or two a word, are slow."""


@pytest.mark.parametrize("name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in _NAMES])
def test_leaving_a_term_out_breaks_parity(name, tmp_path):
    torch.set_num_threads(1)
    spec, good, bad = MUTATIONS[name]
    text = (root("specs") / f"{spec}.yaml").read_text()
    assert good in text
    architecture = resolve(parse_spec(_without_unused_dims(text.replace(good, bad, 1)), "mutated.yaml"))
    write(tmp_path / spec, render(architecture))
    oracle, folder = saved(spec)
    tokens = prompt(40)
    try:
        model = load(folder, tmp_path / spec)
    except CheckpointError:
        # the term's weight is in the file and nothing reads it; let the file skip it, and compare the numbers
        relaxed = tmp_path / spec / "walker.py"
        relaxed.write_text(relaxed.read_text().replace("SKIP = (", 'SKIP = ("*", '))
        with pytest.warns(UserWarning, match="edited by hand"):
            try:
                model = load(folder, tmp_path / spec)
            except CheckpointError as error:  # the mutated spec needs a tensor that no such checkpoint has, or another shape
                assert "lacks" in str(error) or "shape" in str(error)
                return
    got = Harness(model).feed({0: tokens})[0]
    assert not (got - expected(oracle, tokens)).abs().max() < 1e-3


def _without_unused_dims(text: str) -> str:
    """Drop the dims and norms that only the removed term used, and the fields of `tiny` that only they read."""
    from flexgen.spec.diagnostics import SpecError

    try:
        resolve(parse_spec(text, "mutated.yaml"))
    except SpecError as error:
        assert {item.code for item in error.diagnostics} <= {"SPEC010", "SPEC024"}, str(error)
        lines = text.split("\n")
        for span in sorted({item.span for item in error.diagnostics}, reverse=True):
            line = lines[span.line - 1]
            before, after = line[: span.column - 1], line[span.column - 1 :]
            in_flow = before.strip() or after.count("}") > after.count("{")
            after = re.sub(r'^(\w+: ([^,{}]*|\{[^{}]*\}|\[[^\[\]]*\])|"[^"]*")(, ?|(?=[\]}]))', "", after)
            if in_flow:
                lines[span.line - 1] = re.sub(r", ?$", "", before) + after if after.startswith(("}", "]")) else before + after
            else:
                del lines[span.line - 1]
        return _without_unused_dims("\n".join(lines))
    return text
