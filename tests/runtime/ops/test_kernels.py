"""The Triton kernels against their references, on a host through Triton's interpreter.

The interpreter must be chosen before Triton is first imported, so one test runs this file again in a process of its own.
"""

import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

torch.set_num_threads(1)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if not INTERPRETED:

    def test_under_the_interpreter():
        command = [sys.executable, "-m", "pytest", "-q", __file__]
        result = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr

else:
    import numpy as np
    import triton.language as tl
    from test_attention import Requests
    from test_recurrent import KEY, VALUE, VALUE_HEADS, delta_inputs, states, step_of
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    from flexgen.contract.abi import PAD_SLOT
    from flexgen.runtime.execution import tables_kernel
    from flexgen.runtime.execution.tables import SlotTables
    from flexgen.runtime.ops import attention
    from flexgen.runtime.ops import expert_backends as moe
    from flexgen.runtime.ops.experts import keep_groups, top_k
    from flexgen.runtime.ops.kernels import causal_conv, delta_rule, experts, linear, paged_attention, routing
    from flexgen.runtime.ops.recurrent import causal_conv as recurrent_conv
    from flexgen.runtime.ops.recurrent import delta_rule as delta_reference

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

    def attend(requests, scale, *, splits=None, sinks=None, softcap=None, q=None, **words):
        """By the kernel that serves steps of any kind."""
        step, layer = requests.step, requests.layer
        q = torch.cat(requests.queries) if q is None else q
        launch = paged_attention.Launch.of(q, layer.k_pages, requests.table, requests.window)
        if splits is not None:
            launch = paged_attention.Launch(**{**vars(launch), "splits": splits, "least": 1})
        keys = attention.Keys(layer.k_pages, layer.v_pages, requests.table, step.starts_R, step.lengths_R, None)
        return paged_attention.attend(q, keys, attention.Scoring(scale, requests.window, sinks, softcap, True, **words), launch)

    def expect(requests, scale, sinks=None, softcap=None, **words):
        scoring, step = attention.Scoring(scale, requests.window, sinks, softcap, True, **words), requests.step
        pools = (requests.layer.k_pages, requests.layer.v_pages, requests.table)
        q = torch.cat(requests.queries)
        return attention.attend_rows(attention.reference, q, *pools, step.starts_R, step.lengths_R, scoring)

    BATCHES = {
        "decode": ([1, 1, 1], [70, 3, 33]),
        "prefill": ([19, 40], [19, 40]),
        "mixed": ([1, 30, 1, 7], [37, 30, 1, 50]),
    }

    @pytest.mark.parametrize("batch", BATCHES)
    @pytest.mark.parametrize("splits", [1, 3])
    @pytest.mark.parametrize("window", [None, 9])
    @pytest.mark.parametrize("sunk", [False, True])
    def test_attention_equals_the_reference(batch, splits, window, sunk):
        torch.manual_seed(0)
        requests = Requests(*BATCHES[batch], heads=6, kv_heads=2, width=16, page_size=16, window=window)
        sinks = torch.randn(6) if sunk else None
        result = attend(requests, 0.3, splits=splits, sinks=sinks)
        torch.testing.assert_close(result, expect(requests, 0.3, sinks), atol=2e-6, rtol=1e-5)

    @pytest.mark.parametrize("heads, kv_heads, width, page_size", [(5, 1, 80, 16), (4, 4, 64, 32), (8, 1, 24, 128)])
    @pytest.mark.parametrize("batch", ["decode", "mixed"])
    def test_attention_of_any_shape(batch, heads, kv_heads, width, page_size):
        torch.manual_seed(1)
        requests = Requests(*BATCHES[batch], heads=heads, kv_heads=kv_heads, width=width, page_size=page_size)
        torch.testing.assert_close(attend(requests, 0.1), expect(requests, 0.1), atol=5e-6, rtol=1e-5)

    @pytest.mark.parametrize("splits", [1, 4])
    def test_attention_caps_scores(splits):
        torch.manual_seed(2)
        requests = Requests([1, 5], [40, 12], width=16)
        result = attend(requests, 2.0, splits=splits, softcap=3.0)
        torch.testing.assert_close(result, expect(requests, 2.0, softcap=3.0), atol=5e-6, rtol=1e-5)
        assert not torch.allclose(result, expect(requests, 2.0), atol=1e-3)

    @pytest.mark.parametrize("words", [{"chunk": 8}, {"chunk": 20}, {"alibi": 1.0}, {"alibi": 0.3, "chunk": 24}], ids=str)
    @pytest.mark.parametrize("splits", [1, 3])
    def test_attention_in_chunks_and_with_biases_by_distance(words, splits):
        torch.manual_seed(3)
        requests = Requests(*BATCHES["mixed"], heads=6, kv_heads=2, width=16, page_size=16)
        result = attend(requests, 0.3, splits=splits, **words)
        torch.testing.assert_close(result, expect(requests, 0.3, **words), atol=5e-6, rtol=1e-5)
        assert not torch.allclose(result, expect(requests, 0.3), atol=1e-3)

    @pytest.mark.parametrize("batch", BATCHES)
    def test_attention_in_16_bits(batch):
        """fp16: the interpreter multiplies bf16 matrices bit pattern by bit pattern."""
        torch.manual_seed(8)
        requests = Requests(*BATCHES[batch], width=32, dtype=torch.float16)
        torch.testing.assert_close(attend(requests, 0.2), expect(requests, 0.2), atol=2e-3, rtol=2e-3)

    def test_attention_reads_queries_that_are_a_slice():
        torch.manual_seed(3)
        requests = Requests([3, 2], [8, 4], width=16)
        expected = expect(requests, 0.3)
        packed = torch.cat(requests.queries)
        wide = torch.cat((packed, torch.full_like(packed, float("nan"))), dim=-1)
        result = attend(requests, 0.3, q=wide[..., :16])
        torch.testing.assert_close(result, expected, atol=2e-6, rtol=1e-5)

    GPT_OSS = moe.Gate("silu", alpha=1.702, limit=0.7, up_offset=1.0)
    FORMS = {
        "out_in": ("out_in", False, False, moe.Gate()),
        "gelu": ("out_in", False, True, moe.Gate("gelu")),
        "gelu_tanh": ("in_out", False, False, moe.Gate("gelu_tanh")),
        "relu": ("in_out", True, False, moe.Gate("relu")),
        "gpt_oss": ("in_out", True, True, GPT_OSS),
        "limited": ("out_in", False, True, GPT_OSS),
    }

    def expert_weights(form, count, width, inner):
        layout, interleaved, biased, gate = FORMS[form]
        gate_up, down = torch.randn(count, 2 * inner, width) * 0.3, torch.randn(count, width, inner) * 0.3
        if layout == "in_out":
            gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
        biases = (torch.randn(count, 2 * inner), torch.randn(count, width)) if biased else (None, None)
        return moe.ExpertWeights(gate_up, down, layout, interleaved, *biases), gate

    def assert_experts_agree(x, weights_TK, experts_TK, weights, gate, launch=None):
        parts = experts.route_outputs(x, experts_TK, weights, gate, launch) * weights_TK[..., None]
        expected = moe.each(x, experts_TK, weights, gate) * weights_TK[..., None]
        torch.testing.assert_close(parts, expected, atol=2e-5, rtol=1e-4)

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("tokens, count, k", [(1, 4, 2), (3, 5, 5), (37, 3, 2)])
    def test_experts_equal_the_loop(form, tokens, count, k):
        torch.manual_seed(4)
        weights, gate = expert_weights(form, count, 40, 24)
        scores = torch.rand(tokens, count)
        assert_experts_agree(torch.randn(tokens, 40), *top_k(scores, k), weights, gate)

    @pytest.mark.parametrize("form", ["out_in", "gpt_oss"])
    def test_experts_in_16_bits(form):
        torch.manual_seed(9)
        weights, gate = expert_weights(form, 5, 40, 24)
        x, (_, chosen) = torch.randn(9, 40), top_k(torch.rand(9, 5), 2)
        halves = moe.ExpertWeights(*(w.half() if isinstance(w, torch.Tensor) else w for w in vars(weights).values()))
        result = moe.routed(x.half(), chosen, halves, gate)
        assert result.dtype == torch.float16
        torch.testing.assert_close(result.float(), moe.each(x, chosen, weights, gate), atol=2e-2, rtol=5e-3)

    @pytest.mark.parametrize("form", FORMS)
    def test_what_follows_grouped_products_equals_its_plain_form(form):
        torch.manual_seed(10)
        weights, gate = expert_weights(form, 5, 40, 24)
        (_, chosen), down_bias = top_k(torch.rand(7, 5), 3), weights.down_bias
        sorted_M, order_M = chosen.flatten().to(torch.int16).sort(stable=True)
        h_MJ, y_MD = torch.randn(21, 48), torch.randn(21, 40)
        found = moe._gated_cuda(h_MJ, sorted_M, weights, gate)
        torch.testing.assert_close(found, moe._gated(h_MJ, sorted_M, weights, gate), atol=1e-5, rtol=1e-5)
        found = moe._placed_cuda(y_MD, sorted_M, order_M, down_bias)
        torch.testing.assert_close(found, moe._placed(y_MD, sorted_M, order_M, down_bias), atol=1e-6, rtol=1e-6)

    @pytest.mark.parametrize("block_m", [16, 32])
    def test_all_tokens_to_one_expert_and_nan_in_the_others(block_m):
        torch.manual_seed(5)
        weights, gate = expert_weights("out_in", 4, 40, 24)
        weights.gate_up[[0, 1, 3]] = weights.down[[0, 1, 3]] = float("nan")
        chosen = torch.full((50, 1), 2)
        launch = experts.Launch(block_m, 50 // block_m + 4, 16, 32)
        assert_experts_agree(torch.randn(50, 40), torch.rand(50, 1), chosen, weights, gate, launch)

    @pytest.mark.parametrize("tokens, count, k", [(2, 7, 3), (64, 5, 2), (16, 128, 8), (40, 4, 4)])
    @pytest.mark.parametrize("block_m", [16, 32])
    def test_blocks_hold_each_route_once(tokens, count, k, block_m):
        torch.manual_seed(6)
        _, chosen = top_k(torch.rand(tokens, count), k)
        routes = tokens * k
        launch = experts.Launch(block_m, min(routes, routes // block_m + min(count, routes)), 16, 16)
        order, expert, start, rows = experts._sort(chosen, count, launch)
        seen = []
        for e, first, length in zip(expert.tolist(), start.tolist(), rows.tolist()):
            assert 0 <= length <= block_m
            taken = order[first : first + length].tolist() if length else []
            assert all(chosen.flatten()[route] == e for route in taken)
            seen += taken
        assert sorted(seen) == list(range(routes))

    @pytest.mark.parametrize("kept, limit", [(torch.float32, 1e-5), (torch.bfloat16, 8e-3)])
    def test_a_delta_step_equals_the_reference(kept, limit):
        torch.manual_seed(7)
        inputs, slots = delta_inputs(3), [4, 1, 2]
        state = states(slots).to(kept)
        expected_state = state.clone()
        expected = delta_reference(*inputs, expected_state, step_of([1, 1, 1], slots))
        result = delta_rule.delta_step(*inputs, state, torch.tensor(slots))
        assert result.shape == (3, VALUE_HEADS, VALUE) and state.shape[-2] == KEY
        torch.testing.assert_close(result, expected, atol=1e-6, rtol=1e-5)  # what is read is the same
        torch.testing.assert_close(state, expected_state, atol=1e-6, rtol=limit, equal_nan=True)

    # of the outputs, which are rounded once more, and of the state
    DELTA_LIMITS = {torch.float32: (5e-6, 5e-6), torch.float16: (5e-4, 1e-4), torch.bfloat16: (3e-3, 1e-3)}

    def delta_prefill_is_right(inputs, counts, launch=None, *, from_zero=False):
        """Rows that continue, or begin, and slots that no row names, against the reference."""
        dtype, slots = inputs[0].dtype, list(range(len(counts), 0, -1))
        state, step = states(slots), step_of(counts, slots)
        if from_zero:
            state[slots] = 0
        expected_state = state.clone()
        expected = delta_reference(*(x.float() for x in inputs), expected_state, step)
        result = delta_rule.delta_prefill(*inputs, state, step.starts_R, step.state_R, launch)
        assert result.dtype == dtype and state[[0, -1]].isnan().all()
        pairs = (result, expected), (state[1:-1], expected_state[1:-1])
        for (got, wanted), limit in zip(pairs, DELTA_LIMITS[dtype]):
            assert (got.float() - wanted).norm() < limit * wanted.norm()

    @pytest.mark.parametrize("counts", [[1], [64, 65], [1, 130, 3], [16, 17, 1, 15, 12], [3, 0, 40, 0, 0]])
    @pytest.mark.parametrize("dtype", DELTA_LIMITS)
    def test_delta_prefills_equal_the_reference(counts, dtype):
        torch.manual_seed(8)
        delta_prefill_is_right(delta_inputs(sum(counts), dtype), counts)

    @pytest.mark.parametrize("launch", [(16, 16), (32, 32), (64, 16), (64, 64)])
    def test_any_launch_gives_the_delta_rule(launch, monkeypatch):
        torch.manual_seed(9)
        monkeypatch.setattr(delta_rule, "_BLOCK_R", 2)
        counts = [1, 33, 64, 2, 81]
        delta_prefill_is_right(delta_inputs(sum(counts), torch.bfloat16), counts, delta_rule.Launch(*launch))

    @pytest.mark.parametrize("least, most", [(0.9, 1.0), (1e-6, 2e-6)])
    def test_similar_keys_and_small_rates_lose_no_precision(least, most):
        torch.manual_seed(10)
        q, k, v, g, beta = delta_inputs(200, torch.bfloat16)
        delta_prefill_is_right((q, k * 0.05 + 1, v, g * 1e-3, beta * (most - least) + least), [200], from_zero=True)

    @pytest.mark.parametrize("launch", [(16, 64), (64, 32)])
    def test_a_delta_prefill_leaves_padding_rows_out(launch):
        torch.manual_seed(11)
        counts, pads, slots, launch = [12, 70], [2, 0, 1, 66], [1, 2], delta_rule.Launch(*launch)
        inputs, state, step = delta_inputs(82, torch.bfloat16), states([0, 1, 2]), step_of(counts, slots)
        padded_state, padded_step = state.clone(), step_of(counts + pads, slots + [PAD_SLOT] * len(pads))
        padded = [torch.cat((x, torch.full((sum(pads), *x.shape[1:]), math.nan, dtype=x.dtype))) for x in inputs]
        expected = delta_rule.delta_prefill(*inputs, state, step.starts_R, step.state_R, launch)
        result = delta_rule.delta_prefill(*padded, padded_state, padded_step.starts_R, padded_step.state_R, launch)
        assert torch.equal(result[:82], expected) and not result[82:].any()
        torch.testing.assert_close(padded_state, state, atol=0, rtol=0, equal_nan=True)

    @pytest.mark.parametrize("count, k", [(5, 1), (5, 5), (16, 4), (128, 8), (130, 8)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_top_k_is_that_of_torch(count, k, dtype):
        scores = torch.randperm(7 * count).reshape(7, count).sub(3 * count).to(dtype)[:, :count]
        values, ids = routing.top_k(scores, k)
        wanted = torch.topk(scores, k)
        assert torch.equal(values, wanted.values) and torch.equal(scores.gather(1, ids), values)
        assert all(len(set(row)) == k for row in ids.tolist())

    @pytest.mark.parametrize("groups, keep, best", [(4, 2, 2), (8, 3, 1), (1, 1, 2)])
    def test_top_k_of_groups_and_of_scores_that_groups_left_out(groups, keep, best):
        """Its rows are tokens, or groups of tokens; minus infinity is below every score."""
        torch.manual_seed(12)
        scores = torch.randn(7, 32)
        ranked, _ = routing.top_k(scores.unflatten(1, (groups, -1)).flatten(0, 1), best)
        assert torch.equal(ranked, scores.unflatten(1, (groups, -1)).topk(best).values.flatten(0, 1))
        masked = keep_groups(scores, groups, keep, best)
        values, ids = routing.top_k(masked, 4)
        assert torch.equal(values, masked.topk(4).values) and not values.isinf().any()
        assert torch.equal(scores.gather(1, ids), values)

    def test_top_k_takes_the_first_of_equals_and_stays_in_range_on_nan():
        scores = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [float("nan")] * 5, [float("-inf")] * 5])
        _, ids = routing.top_k(scores, 4)
        assert ids[0].tolist() == [1, 2, 4, 3]
        assert all(sorted(row) == [0, 1, 2, 3] for row in ids[1:].tolist())

    @pytest.mark.parametrize("counts", [[1, 1, 1], [1], [5, 1, 2, 9], [3]])
    @pytest.mark.parametrize("channels, taps", [(5, 4), (300, 2), (256, 3)])
    @pytest.mark.parametrize("dtype, act", [(torch.float32, None), (torch.float32, "silu"), (torch.bfloat16, None)])
    def test_convolution_and_its_state(counts, channels, taps, dtype, act):
        step = step_of(counts, [4, 2, 1, 3][: len(counts)])
        u, weight = torch.randn(sum(counts), channels + 3).to(dtype)[:, :channels], torch.randn(channels, taps).to(dtype)
        state = torch.randn(6, channels, taps).to(dtype)
        ours, theirs = state.clone(), state.clone()
        got = causal_conv.causal_conv(u, weight, ours, step.rows_T, step.starts_R, step.state_R, act)
        torch.testing.assert_close(got, recurrent_conv(u, weight, theirs, step, act))
        assert torch.equal(ours, theirs)

    @pytest.mark.parametrize("features, width", [(5, 7), (130, 1500), (64, 1024), (1, 3)])
    @pytest.mark.parametrize("biased", [False, True])
    def test_one_token_times_a_matrix(features, width, biased):
        x, wide = torch.randn(1, 2 * width)[:, ::2], torch.randn(features, width + 5)
        bias = torch.randn(features) if biased else None
        y = linear.linear(x, wide[:, :width], bias)
        torch.testing.assert_close(y, torch.nn.functional.linear(x, wide[:, :width], bias), atol=1e-4, rtol=1e-5)

    @pytest.mark.parametrize("tokens, splits, rows", [(2, 1, 16), (17, 2, 10), (64, 3, 7)])
    @pytest.mark.parametrize("features, width, block_d", [(5, 50, 16), (130, 96, 32), (64, 64, 16)])
    @pytest.mark.parametrize("biased", [False, True])
    def test_few_tokens_times_a_matrix(tokens, splits, rows, features, width, block_d, biased):
        x, wide = torch.randn(tokens, width + 3)[:, :width], torch.randn(features, width + 5)
        bias = torch.randn(features) if biased else None
        launch = linear.Launch(rows, splits, {2: 16, 17: 32, 64: 64}[tokens], block_o=16, block_d=block_d, ahead=64, warps=4, stages=2)
        expected = torch.nn.functional.linear(x, wide[:, :width], bias)
        for _ in range(2):
            y = linear.linear_few(x, wide[:, :width], bias, launch)
            torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-5)

    @settings(deadline=None, max_examples=200)
    @given(tokens=st.integers(2, 64), features=st.integers(1, 40000), width=st.integers(16, 20000))
    def test_every_launch_fits_shared_memory_and_has_no_span_beyond_the_width(tokens, features, width):
        launch = linear.Launch.of(tokens, features, width, torch.device("cpu"))
        assert launch.stages >= 2 and launch.stages * launch.block_d * (launch.block_o + launch.block_t) * 2 <= 2**10 * 224
        steps = math.ceil(width / launch.block_d)
        span = math.ceil(steps / launch.splits) * launch.block_d
        assert (launch.splits - 1) * span < width

    @pytest.mark.parametrize("taken", [[3], [2, 0, 5, 0, 0], [4, 1]])
    def test_tables_by_slot(taken):
        slots_R = torch.tensor(taken)
        theirs = SlotTables(slots=5, groups=1, blocks=5, device=torch.device("cpu"))
        theirs.last_S[1:], theirs.length_S[1:] = torch.randint(0, 9, (5,)), torch.randint(1, 60, (5,))
        theirs.blocks_SB[0][:] = torch.randperm(6 * 5).reshape(6, 5)
        last_S, length_S, (blocks_SB,) = theirs.last_S.clone(), theirs.length_S.clone(), theirs.blocks_SB
        for found, expected in (
            (tables_kernel.rows(slots_R, last_S, length_S), theirs.rows(slots_R)),
            (tables_kernel.places(slots_R, length_S, blocks_SB, 12), theirs.places(slots_R, 0, 12)),
        ):
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, expected, strict=True))
        drawn_R = torch.arange(7, 7 + len(taken))
        tables_kernel.advance(slots_R, drawn_R, last_S, length_S, 0)
        theirs.advance(slots_R, drawn_R)
        assert torch.equal(last_S, theirs.last_S) and torch.equal(length_S, theirs.length_S)
        assert last_S[0] == 0 and length_S[0] == 1
