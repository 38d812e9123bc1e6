"""Paged attention on the host against transformers' eager attention over whole, contiguous keys."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.gpt_oss import modeling_gpt_oss

from flexgen.contract.abi import Layer, PageStep, Step
from flexgen.runtime.ops import attention
from flexgen.runtime.ops.attention import attend, write_pages

torch.set_num_threads(1)
NAN = float("nan")


class Requests:
    """Random keys, values and queries of some requests, paged in random order among pages of NaN.

    `counts`: tokens of this step a row; `lengths`: tokens of each request once they are written.
    """

    def __init__(self, counts, lengths, *, heads=4, kv_heads=2, width=8, page_size=4, dtype=torch.float32, window=None):
        self.counts, self.lengths, self.window = counts, lengths, window
        self.keys = [torch.randn(length, kv_heads, width).to(dtype) for length in lengths]
        self.values = [torch.randn(length, kv_heads, width).to(dtype) for length in lengths]
        self.queries = [torch.randn(count, heads, width).to(dtype) for count in counts]
        blocks = [-(-length // page_size) for length in lengths]
        order = (torch.randperm(sum(blocks)) + 1).tolist()
        table = torch.zeros(len(counts), max(blocks) + 1, dtype=torch.int32)
        for row, used in enumerate(blocks):
            table[row, :used] = torch.tensor([order.pop() for _ in range(used)])
        pool = torch.full((sum(blocks) + 3, page_size, kv_heads, width), NAN, dtype=dtype)
        self.layer = Layer(k_pages=pool, v_pages=pool.clone())
        self.table, self.page_size = table, page_size
        self._write_past()
        self._write_now()

    def _slots(self, row, first, stop):
        at = torch.arange(first, stop)
        return self.table[row, at // self.page_size].long() * self.page_size + at % self.page_size

    def _write_past(self):
        """Only what the window still needs; pages behind it stay NaN."""
        for row, (count, length) in enumerate(zip(self.counts, self.lengths)):
            start = length - count
            first = 0 if self.window is None else max(0, start - self.window + 1)
            pages = PageStep(self._slots(row, first, start), self.table)
            write_pages(self.layer, self.keys[row][first:start], self.values[row][first:start], pages)

    def _write_now(self):
        now = [slice(length - count, length) for count, length in zip(self.counts, self.lengths)]
        slots = torch.cat([self._slots(row, at.start, at.stop) for row, at in enumerate(now)])
        self.pages = PageStep(slots, self.table)
        keys, values = (torch.cat([x[at] for x, at in zip(xs, now)]) for xs in (self.keys, self.values))
        write_pages(self.layer, keys, values, self.pages)

    @property
    def step(self):
        starts = torch.tensor([0, *self.counts]).cumsum(0)
        rows = torch.repeat_interleave(torch.arange(len(self.counts)), torch.tensor(self.counts))
        positions = torch.cat([torch.arange(n - c, n) for c, n in zip(self.counts, self.lengths)])
        return Step(
            positions, rows.int(), starts.int(), torch.tensor(self.lengths).int(), {}
        )

    def attend(self, **kwargs):
        return attend(torch.cat(self.queries), self.layer, self.pages, self.step, window=self.window, **kwargs)

    def expect(self, scale, sinks=None, softcap=None, softmax_fp32=True):
        """A row at a time through transformers' function, its additive mask and all keys."""
        out = []
        for count, length, q, k, v in zip(self.counts, self.lengths, self.queries, self.keys, self.values):
            i, j = torch.arange(length - count, length)[:, None], torch.arange(length)
            visible = (j <= i) & (j > i - (self.window or length + 1))
            mask = torch.zeros(count, length, dtype=q.dtype).masked_fill(~visible, torch.finfo(q.dtype).min)
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            module = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], training=False, sinks=sinks)
            if softmax_fp32:
                o, _ = modeling_gemma4.eager_attention_forward(module, q, k, v, mask, scaling=scale, softcap=softcap)
            else:
                o, _ = modeling_gpt_oss.eager_attention_forward(module, q, k, v, mask, scaling=scale)
            out.append(o[0])
        return torch.cat(out)


rows = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=4)


@settings(deadline=None, max_examples=40)
@given(rows=rows, window=st.none() | st.integers(1, 12), page_size=st.sampled_from([1, 4, 16]), group=st.integers(1, 3))
def test_equals_theirs_whatever_the_pages(rows, window, page_size, group):
    torch.manual_seed(len(rows))
    counts, lengths = [c for c, _ in rows], [c + past for c, past in rows]
    requests = Requests(counts, lengths, heads=2 * group, page_size=page_size, window=window)
    torch.testing.assert_close(requests.attend(scale=0.3), requests.expect(0.3), atol=2e-6, rtol=1e-5)


FEATURES = [
    {},
    {"softcap": 2.0},
    {"sinks": torch.tensor([0.5, -3.0, 6.0, 0.0]), "softmax_fp32": False},
]


@pytest.mark.parametrize("features", FEATURES, ids=lambda f: "-".join(f) or "plain")
@pytest.mark.parametrize("window", [None, 5])
def test_features_equal_theirs(features, window):
    torch.manual_seed(0)
    requests = Requests([3, 1, 6], [10, 17, 6], window=window)
    torch.testing.assert_close(
        requests.attend(scale=0.4, **features), requests.expect(0.4, **features), atol=2e-6, rtol=1e-5
    )


@pytest.mark.parametrize("features", FEATURES, ids=lambda f: "-".join(f) or "plain")
def test_16_bits_round_where_theirs_round(features):
    torch.manual_seed(1)
    features = {key: x.bfloat16() if key == "sinks" else x for key, x in features.items()}
    requests = Requests([7, 12], [7, 12], width=32, dtype=torch.bfloat16)
    assert torch.equal(requests.attend(scale=0.25, **features), requests.expect(0.25, **features))


@pytest.mark.parametrize("window", [None, 3])
def test_fp32_sinks_take_weight_and_give_nothing(window):
    torch.manual_seed(2)
    requests = Requests([4], [9], window=window)
    sinks = torch.randn(4)
    theirs = requests.expect(0.3, sinks=sinks, softmax_fp32=False)
    torch.testing.assert_close(requests.attend(scale=0.3, sinks=sinks), theirs, atol=2e-6, rtol=1e-5)
    none = requests.attend(scale=0.3, sinks=torch.full((4,), -1e30))
    torch.testing.assert_close(none, requests.attend(scale=0.3), atol=2e-6, rtol=1e-5)


def test_sdpa_and_the_reference_agree():
    torch.manual_seed(3)
    requests = Requests([5, 1], [11, 8], window=6)
    scoring = attention.Scoring(0.3, 6, None, None, True)
    step = requests.step
    results = [
        attention.attend_rows(
            run,
            torch.cat(requests.queries),
            requests.layer.k_pages,
            requests.layer.v_pages,
            requests.table,
            step.starts_R,
            step.lengths_R,
            scoring,
        )
        for run in (attention.sdpa, attention.reference)
    ]
    torch.testing.assert_close(*results, atol=2e-6, rtol=1e-5)


def test_backends_serve_what_they_can():
    plain = attention.Scoring(1.0, None, None, None, True)
    sunk = attention.Scoring(1.0, None, torch.zeros(4), None, True)
    assert attention.choose(torch.float32, plain) is attention.sdpa
    assert attention.choose(torch.float32, sunk) is attention.reference
    assert attention.choose(torch.bfloat16, plain) is attention.reference


def test_traces_as_one_graph_and_writes_the_pages():
    torch.manual_seed(4)

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def layer(q, k, v, w, pages, step):
        write_pages(w, k, v, pages)
        return attend(q, w, pages, step, scale=0.3, window=5)

    for counts in ([1, 1, 1], [1, 1]):
        requests = Requests(counts, [9, 4, 6][: len(counts)], window=5)
        expected = requests.attend(scale=0.3)
        written = requests.layer.k_pages.clone()
        keys, values = (torch.cat([x[-1:] for x in xs]) for xs in (requests.keys, requests.values))
        requests.layer.k_pages.view(-1, 2, 8)[requests.pages.slots_T] = NAN
        result = layer(torch.cat(requests.queries), keys, values, requests.layer, requests.pages, requests.step)
        assert torch.equal(result, expected)
        torch.testing.assert_close(requests.layer.k_pages, written, equal_nan=True, rtol=0, atol=0)
