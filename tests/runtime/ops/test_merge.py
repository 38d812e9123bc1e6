"""Low-rank updates added to weights: the kernel against the plain form, through Triton's interpreter in a process of its own."""

import os
import subprocess
import sys

import pytest
import torch

from flexgen.runtime.ops.merge import merge_low_rank, merge_plain, together

torch.set_num_threads(1)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = [torch.float32, torch.bfloat16]


def draw(*shape, seed=0, dtype=torch.float32, whole=False):
    """Normal numbers, or whole ones whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    made = torch.randint(-3, 4, shape, generator=generator) if whole else torch.randn(*shape, generator=generator)
    return made.to(dtype)


def weights(experts, features, width, dtype, turned):
    """A base (E, O, I), stored (E, I, O) where turned, and storage for what is merged."""
    shape = (experts, width, features) if turned else (experts, features, width)
    base = draw(*shape, dtype=dtype)
    out = torch.full_like(base, torch.nan)
    return (out.transpose(1, 2), base.transpose(1, 2)) if turned else (out, base)


def update(experts, features, width, rank, scale=0.5, **options):
    return scale, draw(experts, features, rank, seed=1, **options), draw(experts, rank, width, seed=2, **options)


def written_out(base, updates):
    return base.double() + sum(scale * (b.double() @ a.double()) for scale, b, a in updates)


if not INTERPRETED:

    def test_the_kernel_under_the_interpreter():
        command = [sys.executable, "-m", "pytest", "-q", __file__]
        result = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr

    @pytest.mark.parametrize("turned", [False, True])
    @pytest.mark.parametrize("experts", [1, 3])
    def test_the_plain_form_is_the_sum(experts, turned):
        out, base = weights(experts, 10, 14, torch.float32, turned)
        updates = [update(experts, 10, 14, 3), update(experts, 10, 14, 2, scale=-2.0)]
        merge_low_rank(out, base, updates)
        torch.testing.assert_close(out.double(), written_out(base, updates), atol=1e-5, rtol=1e-6)
        both = torch.empty_like(base)
        merge_plain(both, base, [together(updates)])
        torch.testing.assert_close(both, out, atol=1e-5, rtol=1e-6)

else:
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    from flexgen.runtime.ops.kernels import merge as kernels

    def rounding_cast(builder, x, dtype):
        """To the nearest bf16, where the interpreter cuts off."""
        if (x.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return cast(builder, x, dtype)
        values = torch.from_numpy(np.ascontiguousarray(x.data))
        return TensorHandle(values.bfloat16().view(torch.uint16).numpy(), tl.bfloat16)

    def dot_of_values(builder, a, b, *rest):
        """The interpreter multiplies the bits of bf16."""
        a, b = (builder.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(builder, a, b, *rest)

    cast, InterpreterBuilder.cast_impl = InterpreterBuilder.cast_impl, rounding_cast
    dot, InterpreterBuilder.create_dot = InterpreterBuilder.create_dot, dot_of_values

    SHAPES = [(1, 130, 200, 3), (1, 64, 700, 70), (5, 70, 150, 16), (3, 20, 30, 4)]
    """Of experts, features, width and rank: one matrix and several, more than a tile, more ranks than a tile has."""

    @pytest.mark.parametrize("turned", [False, True])
    @pytest.mark.parametrize("factors", DTYPES)
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("experts, features, width, rank", SHAPES)
    def test_exact_sums_have_the_bits_of_the_plain_form(experts, features, width, rank, dtype, factors, turned):
        out, base = weights(experts, features, width, dtype, turned)
        wanted, one = torch.empty_like(base), update(experts, features, width, rank, dtype=factors, whole=True)
        kernels.merge_fused(out, base, *one)
        merge_plain(wanted, base, [one])
        assert torch.equal(out, wanted) and (out != base).float().mean() > 0.5

    @pytest.mark.parametrize("turned", [False, True])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_other_sums_differ_by_the_last_place(dtype, turned):
        out, base = weights(4, 70, 150, dtype, turned)
        wanted, updates = torch.empty_like(base), [update(4, 70, 150, 5), update(4, 70, 150, 3, scale=-2.0, dtype=torch.bfloat16)]
        kernels.merge_fused(out, base, *together(updates))
        merge_plain(wanted, base, updates)
        bound = {torch.float32: {"atol": 1e-5, "rtol": 1e-6}, torch.bfloat16: {"atol": 1e-5, "rtol": 2**-7}}[dtype]
        torch.testing.assert_close(out, wanted, **bound)
        assert (out != wanted).float().mean() < (0.01 if dtype == torch.bfloat16 else 1)

    def test_factors_and_weights_may_lie_anyhow():
        """An embedding's A and B are transposed views, and a module is some rows of a fused weight."""
        storage = draw(90, 40)
        base, out = storage[20:70][None], torch.zeros(90, 40)
        scale, b, a = update(1, 50, 40, 4, whole=True)
        b, a = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in (b, a))
        kernels.merge_fused(out[20:70][None], base, scale, b, a)
        assert torch.equal(out[20:70], storage[20:70] + scale * (b[0] @ a[0]))
        assert not out[:20].any() and not out[70:].any()

    def test_an_update_of_zero_leaves_the_base():
        out, base = weights(2, 70, 150, torch.bfloat16, False)
        kernels.merge_fused(out, base, 2.0, torch.zeros(2, 70, 4), draw(2, 4, 150))
        assert torch.equal(out, base)

    def test_a_wider_copy_is_not_rounded():
        _, base = weights(1, 20, 30, torch.bfloat16, False)
        out, one = torch.empty(1, 20, 30), update(1, 20, 30, 3)
        kernels.merge_fused(out, base, *one)
        torch.testing.assert_close(out.double(), written_out(base, [one]), atol=1e-5, rtol=1e-6)
