"""Low-rank updates by token: every form against a sum written out, kernels through Triton's interpreter in a process of its own."""

import os
import subprocess
import sys

import pytest
import torch

from flexgen.runtime.ops import expert_backends as moe
from flexgen.runtime.ops.elementwise import project
from flexgen.runtime.ops.experts import experts
from flexgen.runtime.ops.lora import Adapted, lora, lora_grouped, lora_loop, lora_masked

torch.set_num_threads(1)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def entries(count, most, seed=0):
    """Indices with every entry, and none, among them."""
    found = torch.randint(-1, most, (count,), generator=torch.Generator().manual_seed(seed))
    return torch.cat((torch.arange(-1, most), found))[:count]


def written_out(x, a, b, index, rows, choices=1):
    rank, out = b.shape[2], torch.zeros(len(index), b.shape[1], dtype=torch.float64)
    for m, entry in enumerate(index.tolist()):
        start = 0
        for part, count in enumerate(rows if entry >= 0 else ()):
            h = a[entry, part * rank : (part + 1) * rank].double() @ x[m // choices].double()
            out[m, start : start + count] = b[entry, start : start + count].double() @ h
            start += count
    return out


SHAPES = [((7,), 3, 1), ((4, 2, 2), 2, 1), ((16,), 8, 4)]

if not INTERPRETED:

    def test_kernels_under_the_interpreter():
        command = [sys.executable, "-m", "pytest", "-q", __file__]
        result = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr

    @pytest.mark.parametrize("rows, rank, choices", SHAPES)
    def test_the_plain_form_is_the_sum(rows, rank, choices):
        x, index = draw(12 // choices, 10), entries(12, 3)
        a, b = draw(3, len(rows) * rank, 10), draw(3, sum(rows), rank)
        wanted = written_out(x, a, b, index, rows, choices)
        assert (lora(x, a, b, index, rows, choices) - wanted).abs().max() < 1e-5 and wanted.abs().max() > 1
        if choices == 1:
            assert (lora_masked(x, a, b, index, rows) - wanted).abs().max() < 1e-5

    def test_the_grouped_form_is_the_loop():
        x, index = draw(10, 16, dtype=torch.bfloat16), entries(40, 6)
        a, b = draw(6, 8, 16, dtype=torch.bfloat16), draw(6, 24, 8, dtype=torch.bfloat16)
        got, wanted = lora_grouped(x, a, b, index, 4), lora_loop(x, a, b, index, (24,), 4)
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)
        assert not got[index < 0].any()

    def test_rows_without_an_adapter_are_those_of_the_weight_alone():
        x, weight = draw(9, 10), draw(8, 10)
        adapted = Adapted(weight, draw(2, 6, 10), draw(2, 8, 3), torch.tensor([0, 1, 0, 2, 0, 0, 1, 2, 0, 1, 1]), (5, 3))
        got, plain = project(x, adapted), project(x, weight)
        base = adapted.slots_T[:9] == 0
        assert torch.equal(got[base], plain[base]) and ((got - plain)[~base].abs().sum(-1) > 0.1).all()

    @pytest.mark.parametrize("layout", ["out_in", "in_out"])
    def test_experts_with_updates_are_experts_of_merged_weights(layout):
        count, width, inner, tokens = 4, 12, 8, 10
        x, chosen = draw(tokens, width), torch.stack([torch.randperm(count)[:2] for _ in range(tokens)])
        weights, slots = draw(tokens, 2).softmax(-1), torch.tensor([0, 1, 2] * 3 + [1, 0, 0])
        shapes = {"gate_up": (2 * inner, width), "down": (width, inner)}
        turned = (lambda w: w) if layout == "out_in" else (lambda w: w.transpose(1, 2).contiguous())
        base = {name: draw(count, *shape) for name, shape in shapes.items()}
        a = {name: draw(2, count, 3, shape[1], seed=3) for name, shape in shapes.items()}
        b = {name: draw(2, count, shape[0], 3, seed=4) for name, shape in shapes.items()}
        adapted = {name: Adapted(turned(base[name]), a[name], b[name], slots, (shapes[name][0],)) for name in shapes}
        fields = {"layout": layout, "interleaved": layout == "in_out"}
        got = experts(x, weights, chosen, adapted["gate_up"], adapted["down"], **fields)
        for slot in range(3):
            merged = [turned(base[name] + (b[name][slot - 1] @ a[name][slot - 1] if slot else 0)) for name in shapes]
            wanted, mine = experts(x, weights, chosen, *merged, **fields), slots[:tokens] == slot
            torch.testing.assert_close(got[mine], wanted[mine], rtol=1e-4, atol=1e-4)

    def test_backends_for_many_tokens_take_updates():
        x, chosen, weights = adapted_experts(torch.bfloat16, "out_in", 24)
        wanted = moe.each(x, chosen, weights, moe.Gate())
        torch.testing.assert_close(moe.grouped(x, chosen, weights, moe.Gate()), wanted, rtol=4e-2, atol=4e-2)


def adapted_experts(dtype, layout, tokens, count=5, width=16, inner=16):
    x, slots = draw(tokens, width, dtype=dtype), torch.arange(tokens) % 3
    chosen = torch.stack([torch.randperm(count, generator=torch.Generator().manual_seed(t))[:2] for t in range(tokens)])
    shapes = [(2 * inner, width), (width, inner)]
    base = [0.3 * draw(count, *(shape if layout == "out_in" else shape[::-1]), dtype=dtype) for shape in shapes]
    tables = [table for o, i in shapes for table in (draw(2, count, 8, i, dtype=dtype), 0.2 * draw(2, count, o, 8, dtype=dtype))]
    return x, chosen, moe.ExpertWeights(*base, layout, layout == "in_out", None, None, *tables, slots)


if INTERPRETED:
    from flexgen.runtime.ops.kernels import experts as kernels
    from flexgen.runtime.ops.kernels.lora import lora_gathered

    @pytest.mark.parametrize("rows, rank, choices", [*SHAPES, ((40, 20), 16, 1)])
    @pytest.mark.parametrize("width", [10, 600])
    def test_gathered_rows_are_the_loop(rows, rank, choices, width):
        x, index = draw(12 // choices, width), entries(12, 3)
        a, b = draw(3, len(rows) * rank, width), draw(3, sum(rows), rank)
        torch.testing.assert_close(
            lora_gathered(x, a, b, index, rows, choices), lora_loop(x, a, b, index, rows, choices), rtol=1e-4, atol=1e-3
        )

    @pytest.mark.parametrize("layout", ["out_in", "in_out"])
    @pytest.mark.parametrize("tokens", [1, 2, 7])
    def test_routed_experts_take_updates(layout, tokens):
        x, chosen, weights = adapted_experts(torch.float32, layout, tokens)
        weights.slots_T.add_(1).remainder_(3)
        wanted = moe.each(x, chosen, weights, moe.Gate())
        torch.testing.assert_close(kernels.route_outputs(x, chosen, weights, moe.Gate()), wanted, rtol=1e-4, atol=1e-3)
