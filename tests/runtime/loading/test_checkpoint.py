"""Checkpoints that transformers wrote, and what befalls them: every tensor placed, every flaw named."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flexgen.assets import root
from flexgen.errors import ConfigError
from flexgen.runtime.loading.checkpoint import CheckpointError
from flexgen.runtime.loading.model import Model
from flexgen.runtime.loading.mxfp4 import dequantise
from flexgen.spec.load import load_spec

FILE = "model.safetensors"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory that transformers saves a spec's tiny model to, made once."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    made: dict[str, Path] = {}

    def write(spec: str) -> Path:
        if spec not in made:
            fields = copy.deepcopy(load_spec(root("specs") / f"{spec}.yaml").model.tiny)
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_()
            made[spec] = tmp_path_factory.mktemp(spec)
            model.save_pretrained(made[spec])
        return made[spec]

    return write


@pytest.fixture
def checkpoint(written: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a spec's checkpoint with its tensors and config changed."""

    def change(spec: str, edit: Callable[[dict[str, Tensor]], Any] = lambda tensors: None, **config: Any) -> Path:
        folder = tmp_path / f"{spec}-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(written(spec), folder)
        tensors = load_file(folder / FILE)
        edit(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / FILE, {"format": "pt"})
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**raw, **config}))
        return folder

    return change


def load(folder: Path, **arguments: Any) -> Model:
    return Model.load(folder, device="cpu", **arguments)


def storages(model: Model) -> dict[str, Tensor]:
    return {f"{weight.role}.{index}": getattr(layer, weight.role) for layer, weight, index in model.storages()}


def assert_same(one: Model, other: Model) -> None:
    ours, theirs = storages(one), storages(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# ---------------------------------------------------------------- placing


def test_parts_lie_end_to_end(written):
    folder = written("llama")
    tensors, model = load_file(folder / FILE), load(folder)
    for index, layer in enumerate(model.layers):
        for kind in ("weight", "bias"):
            parts = [tensors[f"model.layers.{index}.self_attn.{name}_proj.{kind}"] for name in "qkv"]
            assert torch.equal(getattr(layer, "qkv" if kind == "weight" else "qkv_bias"), torch.cat(parts))
    assert model.report.read == len(tensors)
    assert model.report.bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert not any(tensor.requires_grad or tensor.is_inference() for tensor in storages(model).values())


def test_a_tied_head_is_the_embedding(written):
    weights = load(written("qwen3")).weights
    assert weights.lm_head is weights.embed_tokens


def test_stacked_and_per_expert_files_fill_the_same_storage(written, checkpoint):
    def stack(tensors: dict[str, Tensor]) -> None:
        for prefix in {name.split(".experts.")[0] for name in tensors if ".experts." in name}:
            gate, up, down = (
                torch.stack([tensors.pop(f"{prefix}.experts.{e}.{part}_proj.weight") for e in range(8)])
                for part in ("gate", "up", "down")
            )
            tensors[f"{prefix}.experts.gate_up_proj"] = torch.cat((gate, up), dim=1)
            tensors[f"{prefix}.experts.down_proj"] = down

    stacked = load(checkpoint("qwen3_moe", stack))
    per_expert = load(written("qwen3_moe"))
    assert stacked.report.read < per_expert.report.read
    assert_same(stacked, per_expert)


def quantise(tensors: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Random MXFP4 experts in place of stacked ones -> blocks and scales by name."""
    generator = torch.Generator().manual_seed(0)
    packed = {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, out = tensors.pop(name).shape
        shape = (experts, out, inner // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 130, shape, dtype=torch.uint8, generator=generator)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = packed[name] = blocks, scales
    return packed


def widen(tensors: dict[str, Tensor]) -> None:
    """gpt-oss experts of 64 inner values, so that groups of 32 divide them."""
    sizes = {"gate_up_proj": (8, 64, 128), "gate_up_proj_bias": (8, 128), "down_proj": (8, 64, 64)}
    for name in tensors:
        if (size := sizes.get(name.split(".")[-1])) is not None:
            tensors[name] = torch.randn(size)


def test_mxfp4_is_dequantised(checkpoint):
    packed = {}
    folder = checkpoint("gpt_oss", lambda t: (widen(t), packed.update(quantise(t))), intermediate_size=64)
    model = load(folder)
    for index, layer in enumerate(model.layers):
        for role, name in (("moe_gate_up", "gate_up_proj"), ("moe_down", "down_proj")):
            wanted = dequantise(*packed[f"model.layers.{index}.mlp.experts.{name}"], torch.bfloat16)
            assert torch.equal(getattr(layer, role), wanted.float())


def test_shards_equal_one_file(written, checkpoint):
    folder = checkpoint("llama")
    tensors = load_file(folder / FILE)
    (folder / FILE).unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (folder / f"{FILE}.index.json").write_text(json.dumps(index))
    assert_same(load(folder), load(written("llama")))
    (folder / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks b\.safetensors"):
        load(folder)


def test_multimodal_names_and_what_they_skip(written, checkpoint):
    def nest(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
        tensors.update({"model.vision_tower.patch.weight": torch.ones(2), "model.audio_tower.weight": torch.ones(2)})

    model = load(checkpoint("gemma4_e", nest))
    assert_same(model, load(written("gemma4_e")))
    assert model.report.skipped == {"model.vision_tower.*": 1, "model.audio_tower.*": 1}


def test_keys_of_layers_that_share_them_are_skipped_and_only_those_are_counted(written, checkpoint):
    name = "model.layers.5.self_attn.k_proj.weight"
    model = load(checkpoint("gemma4_e", lambda tensors: tensors.setdefault(name, torch.ones(32, 64))))
    assert model.report.skipped == {"layers.*.self_attn.k_proj.weight": 1}


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float16, "auto"])
def test_dtype_is_converted(written, dtype):
    model, exact = load(written("llama"), dtype=dtype), load(written("llama"), dtype="float32")
    wanted = {"bfloat16": torch.bfloat16, "auto": torch.float32}.get(dtype, dtype)
    assert model.dtype == wanted
    assert all(torch.equal(t, storages(exact)[name].to(wanted)) for name, t in storages(model).items())


# ---------------------------------------------------------------- flaws

Q = "model.layers.1.self_attn.q_proj"
FLAWS = {
    "missing": ("llama", lambda t: t.pop(f"{Q}.weight"), {}, r"lacks layers\.1\.self_attn\.q_proj\.weight"),
    "missing expert": ("qwen3_moe", lambda t: t.pop("model.layers.0.mlp.experts.7.up_proj.weight"), {}, r"experts\.7"),
    "no experts": ("gpt_oss", lambda t: t.pop("model.layers.0.mlp.experts.down_proj"), {}, "none of them"),
    "extra": ("llama", lambda t: t.update({"model.layers.1.strange": torch.ones(1)}), {}, r"model\.layers\.1\.strange"),
    "extra layer": ("llama", lambda t: t.update({"model.layers.9.x": torch.ones(1)}), {}, r"model\.layers\.9\.x"),
    "misshaped": ("llama", lambda t: t.update({f"{Q}.weight": torch.ones(96, 63)}), {}, r"\(96, 63\).*\(96, 64\)"),
    "quantised": ("llama", lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].to(torch.int8)}), {}, "int8"),
    "bias against the flag": ("llama", lambda t: None, {"attention_bias": False}, "bias"),
    "flag against the bias": ("llama", lambda t: t.pop(f"{Q}.bias"), {}, r"q_proj\.bias"),
    "untied head": ("qwen3", lambda t: t.update({"lm_head.weight": torch.ones(211, 64)}), {}, "tie_word_embeddings"),
    "no head": ("qwen3", lambda t: None, {"tie_word_embeddings": False}, r"lacks lm_head\.weight"),
    "two prefixes": (
        "gemma4_e",
        lambda t: t.update({"model.language_model.layers.0.layer_scalar": torch.ones(1)}),
        {},
        "exactly one of model, model.language_model",
    ),
    "two layouts": (
        "qwen3_moe",
        lambda t: t.update({"model.layers.0.mlp.experts.down_proj": torch.ones(8, 64, 40)}),
        {},
        "more than one of them",
    ),
    "twice": ("llama", lambda t: t.update({"norm.weight": torch.ones(64)}), {}, r"norm\.weight twice"),
}  # fmt: skip


@pytest.mark.parametrize("flaw", FLAWS)
def test_flaws_are_named(flaw, checkpoint):
    spec, edit, config, message = FLAWS[flaw]
    with pytest.raises(CheckpointError, match=message):
        load(checkpoint(spec, edit, **config))


def test_an_equal_head_beside_a_tied_embedding_is_accepted(written, checkpoint):
    name = "model.embed_tokens.weight"
    model = load(checkpoint("qwen3", lambda tensors: tensors.update({"lm_head.weight": tensors[name].clone()})))
    assert_same(model, load(written("qwen3")))


@pytest.mark.parametrize("keep", [0, 7, 3000, -1])
def test_a_truncated_file_is_named(keep, checkpoint):
    folder = checkpoint("llama")
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or damaged"):
        load(folder)


def test_a_tensor_in_two_files_is_named(checkpoint):
    folder = checkpoint("llama")
    (folder / FILE).rename(folder / "a.safetensors")
    save_file({"model.norm.weight": torch.ones(64)}, folder / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.safetensors and .*b\.safetensors hold model\.norm\.weight"):
        load(folder)


def test_a_half_mxfp4_pair_is_named(checkpoint):
    name = "model.layers.2.mlp.experts.down_proj_scales"
    folder = checkpoint("gpt_oss", lambda t: (widen(t), quantise(t), t.pop(name)), intermediate_size=64)
    with pytest.raises(CheckpointError, match=r"lacks layers\.2\.mlp\.experts\.down_proj_scales"):
        load(folder)


def test_pickles_are_refused_with_the_way_to_convert(checkpoint):
    folder = checkpoint("llama")
    (folder / FILE).rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*save_pretrained"):
        load(folder)


def test_a_directory_without_weights(checkpoint):
    folder = checkpoint("llama")
    (folder / FILE).unlink()
    with pytest.raises(CheckpointError, match="no safetensors"):
        load(folder)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": []}', "[]"])
def test_a_damaged_index_is_named(text, checkpoint):
    folder = checkpoint("llama")
    (folder / f"{FILE}.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json (is damaged|is not JSON|holds a list)"):
        load(folder)


# ---------------------------------------------------------------- the model


@pytest.mark.parametrize("spec", ["llama", "qwen3_moe", "gpt_oss", "qwen3_5"])
def test_dummy_weights_need_no_file_and_repeat(spec, checkpoint):
    folder = checkpoint(spec)
    (folder / FILE).unlink()
    model = load(folder, load_format="dummy")
    assert_same(model, load(folder, load_format="dummy"))
    assert all(torch.isfinite(tensor).all() for tensor in storages(model).values())
    assert all((layer.input_layernorm == 1).all() for layer in model.layers)
    matrices = {name: tensor for name, tensor in storages(model).items() if tensor.dim() > 1 and "_bias." not in name}
    for name, tensor in matrices.items():
        assert tensor.std().item() == pytest.approx(1.0 if "_router." in name else 0.02, rel=0.35)
    assert len({tensor.sum().item() for tensor in matrices.values()}) == len(matrices)


def test_rope_tables_are_shared_by_the_layers_of_an_entry(written):
    model = load(written("gemma4_e"))
    model.make_rope_tables(64)
    tables = {mixers: layer.rope_cos for layer, mixers in zip(model.layers, model.mixers, strict=True)}
    assert all(layer.rope_cos is tables[mixers] for layer, mixers in zip(model.layers, model.mixers, strict=True))
    assert tables[("sliding",)].shape == (64, 8) and tables[("full",)].shape == (64, 16)


@pytest.mark.parametrize("shared, owner", [(6, "sliding"), (5, "full")])
def test_a_shared_layer_needs_an_owner_before_it(shared, owner, checkpoint):
    with pytest.raises(ConfigError, match=f"earlier {owner} layer"):
        load(checkpoint("gemma4_e", num_kv_shared_layers=shared))


@pytest.mark.parametrize("argument", [{"load_format": "pt"}, {"dtype": "int8"}, {"dtype": torch.int8}])
def test_unknown_arguments_are_refused(argument, written):
    with pytest.raises(ValueError, match=next(iter(argument))):
        load(written("llama"), **argument)
