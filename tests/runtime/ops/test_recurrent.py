"""The gated delta net against a sequential rule in float64 and transformers' own functions."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_5 import modeling_qwen3_5

from flexgen.contract.abi import Step
from flexgen.runtime.ops.recurrent import causal_conv, delta_rule

torch.set_num_threads(1)
NAN = float("nan")
KEY_HEADS, VALUE_HEADS, KEY, VALUE, TAPS, CHANNELS = 2, 4, 8, 6, 4, 5


def step_of(counts, slots):
    starts = torch.tensor([0, *counts]).cumsum(0)
    rows = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    positions = torch.cat([torch.arange(count) for count in counts])
    lengths = torch.tensor(counts).int()
    return Step(positions, rows.int(), starts.int(), lengths, {}, state_R=torch.tensor(slots))


def delta_inputs(tokens, dtype=torch.float32):
    q, k = torch.randn(2, tokens, KEY_HEADS, KEY).to(dtype)
    v = torch.randn(tokens, VALUE_HEADS, VALUE).to(dtype)
    return q, k, v, -torch.rand(tokens, VALUE_HEADS) * 2, torch.rand(tokens, VALUE_HEADS).to(dtype)


def sequential(q, k, v, g, beta, state):
    """The rule as published, one token at a time, in float64: (outputs, state)."""
    q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, state))
    group = VALUE_HEADS // KEY_HEADS
    outputs = []
    for t in range(len(q)):
        out = []
        for h in range(VALUE_HEADS):
            unit_q, unit_k = (x[t, h // group] / (x[t, h // group].pow(2).sum() + 1e-6).sqrt() for x in (q, k))
            s = state[h] * g[t, h].exp()
            s = s + torch.outer(unit_k, beta[t, h] * (v[t, h] - s.T @ unit_k))
            state[h] = s
            out.append(s.T @ unit_q * KEY**-0.5)
        outputs.append(torch.stack(out))
    return torch.stack(outputs), state


def states(slots):
    """State of `slots`; every other slot is NaN."""
    state = torch.full((max(slots) + 2, VALUE_HEADS, KEY, VALUE), NAN)
    state[slots] = torch.randn(len(slots), VALUE_HEADS, KEY, VALUE)
    return state


@settings(deadline=None, max_examples=15)
@given(counts=st.lists(st.sampled_from([1, 2, 3, 16, 63, 64, 65, 130]), min_size=1, max_size=4))
def test_delta_rule_equals_the_sequential_rule(counts):
    torch.manual_seed(sum(counts))
    slots = (torch.randperm(6)[: len(counts)] + 1).tolist()
    state, inputs = states(slots), delta_inputs(sum(counts))
    before = state.clone()
    outputs = delta_rule(*inputs, state, step_of(counts, slots))
    start = 0
    for count, slot in zip(counts, slots):
        expected, after = sequential(*(x[start : start + count] for x in inputs), before[slot])
        torch.testing.assert_close(outputs[start : start + count].double(), expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(state[slot].double(), after, atol=1e-4, rtol=0)
        start += count
    others = [slot for slot in range(len(state)) if slot not in slots]
    assert torch.isnan(state[others]).all()


@pytest.mark.parametrize("sizes", [[1] * 40, [3] * 13 + [1], [16, 24], [40]])
def test_chunks_of_any_size_make_one_sequence(sizes):
    torch.manual_seed(0)
    inputs = delta_inputs(sum(sizes))
    state = torch.zeros(2, VALUE_HEADS, KEY, VALUE)
    parts = [
        delta_rule(*(x[at - size : at] for x in inputs), state, step_of([size], [1]))
        for size, at in zip(sizes, torch.tensor(sizes).cumsum(0).tolist())
    ]
    expected, after = sequential(*inputs, torch.zeros(VALUE_HEADS, KEY, VALUE))
    torch.testing.assert_close(torch.cat(parts).double(), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(state[1].double(), after, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 70])
def test_delta_rule_equals_theirs(dtype, tokens):
    torch.manual_seed(1)
    q, k, v, g, beta = delta_inputs(tokens, dtype)
    state = states([1])
    theirs = (
        modeling_qwen3_5.torch_recurrent_gated_delta_rule
        if tokens == 1
        else modeling_qwen3_5.torch_chunk_gated_delta_rule
    )
    expected, after = theirs(
        *(x[None] for x in (q, k, v)),
        g=g[None],
        beta=beta[None],
        initial_state=state[1:2].clone(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    outputs = delta_rule(q, k, v, g, beta, state, step_of([tokens], [1]))
    assert outputs.dtype == dtype
    torch.testing.assert_close(outputs, expected[0], atol=2e-5, rtol=8e-3 if dtype == torch.bfloat16 else 1e-4)
    torch.testing.assert_close(state[1:2], after, atol=2e-5, rtol=1e-4)


def test_strong_decay_does_not_overflow():
    torch.manual_seed(2)
    q, k, v, g, beta = delta_inputs(128)
    state = torch.zeros(2, VALUE_HEADS, KEY, VALUE)
    outputs = delta_rule(q, k, v, g * 60, beta, state, step_of([128], [1]))
    assert torch.isfinite(outputs).all() and torch.isfinite(state).all()


@settings(deadline=None, max_examples=25)
@given(counts=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_causal_conv_equals_theirs(counts):
    torch.manual_seed(sum(counts))
    slots = (torch.randperm(6)[: len(counts)] + 1).tolist()
    state = torch.full((8, CHANNELS, TAPS), NAN)
    state[slots] = torch.randn(len(slots), CHANNELS, TAPS)
    before = state.clone()
    u, weight = torch.randn(sum(counts), CHANNELS), torch.randn(CHANNELS, TAPS)
    result = causal_conv(u, weight, state, step_of(counts, slots))
    start = 0
    for count, slot in zip(counts, slots):
        row = u[start : start + count].T
        after = before[slot].clone()[None]
        expected = modeling_qwen3_5.causal_conv1d_update(row[None], after, weight)
        torch.testing.assert_close(result[start : start + count], expected[0].T)
        assert torch.equal(state[slot], after[0])
        start += count
    assert torch.isnan(state[[slot for slot in range(8) if slot not in slots]]).all()


def test_causal_conv_rounds_once_in_16_bits():
    torch.manual_seed(3)
    u, weight = torch.randn(20, CHANNELS).bfloat16(), torch.randn(CHANNELS, TAPS).bfloat16()
    state = torch.zeros(2, CHANNELS, TAPS).bfloat16()
    result = causal_conv(u, weight, state, step_of([20], [1]))
    exact = F.conv1d(u.double().T[None], weight.double()[:, None], padding=TAPS - 1, groups=CHANNELS)[0, :, :20].T
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.double(), exact, atol=1e-6, rtol=2**-8)


@pytest.mark.parametrize("poison", [NAN, float("inf")])
def test_padding_rows_change_nothing(poison):
    torch.manual_seed(4)
    inputs, u, weight = delta_inputs(3), torch.randn(3, CHANNELS), torch.randn(CHANNELS, TAPS)
    results = []
    for pads in (0, 2):
        torch.manual_seed(5)
        rule, conv = torch.randn(4, VALUE_HEADS, KEY, VALUE), torch.randn(4, CHANNELS, TAPS)
        rule[0] = conv[0] = poison
        step = step_of([1] * (3 + pads), [2, 1, 3] + [0] * pads)
        padded = [torch.cat((x, torch.full_like(x[:1], poison).expand(pads, *x.shape[1:]))) for x in (*inputs, u)]
        outputs = delta_rule(*padded[:-1], rule, step)[:3]
        results.append((outputs, causal_conv(padded[-1], weight, conv, step)[:3], rule[1:], conv[1:]))
    assert all(torch.equal(plain, padded) for plain, padded in zip(*results))


def test_traces_as_one_graph():
    torch.manual_seed(6)
    weight = torch.randn(CHANNELS, TAPS)

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def mixer(inputs, u, rule, conv, step):
        return delta_rule(*inputs, rule, step), causal_conv(u, weight, conv, step)

    for counts in ([1, 1], [1, 1, 1], [5, 70]):
        inputs, u = delta_inputs(sum(counts)), torch.randn(sum(counts), CHANNELS)
        step = step_of(counts, list(range(1, len(counts) + 1)))
        start = (torch.randn(5, VALUE_HEADS, KEY, VALUE), torch.randn(5, CHANNELS, TAPS))
        traced, plain = ([x.clone() for x in start] for _ in range(2))
        results = mixer(inputs, u, *traced, step)
        expected = mixer._torchdynamo_orig_callable(inputs, u, *plain, step)
        torch.testing.assert_close((*results, *traced), (*expected, *plain))
