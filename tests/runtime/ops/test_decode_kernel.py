"""Attention of decode steps in Triton, on a host through its interpreter: how keys are split, and what comes of it.

The interpreter must be chosen before Triton is first imported, so one test runs this file again in a process of its own.
"""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

torch.set_num_threads(1)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CPU = torch.device("cpu")

if not INTERPRETED:

    def test_under_the_interpreter():
        command = [sys.executable, "-m", "pytest", "-q", __file__]
        result = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr

else:
    from test_attention import Requests

    from flexgen.runtime.ops import attention
    from flexgen.runtime.ops.kernels import paged_decode

    def attend(lengths, *, window=None, sinks=None, softcap=None, planned=False, q=None, words=None, **geometry):
        """The kernel's result and the reference's."""
        torch.manual_seed(sum(lengths))
        requests = Requests([1] * len(lengths), lengths, window=window, **geometry)
        layer, step = requests.layer, requests.step
        q = torch.cat(requests.queries) if q is None else q(torch.cat(requests.queries))
        keys = attention.Keys(layer.k_pages, layer.v_pages, requests.table, step.starts_R, step.lengths_R, None)
        if planned:
            split = split_of(requests)
            keys = attention.Keys(*list(vars(keys).values())[:5], paged_decode.plan(step.lengths_R, split, window))
        scoring = attention.Scoring(0.3, window, sinks, softcap, True, **(words or {}))
        expected = attention.attend_rows(attention.reference, q, *list(vars(keys).values())[:5], scoring)
        return paged_decode.attend(q, keys, scoring), expected

    def split_of(requests):
        _, page_size, kv_heads, width = requests.layer.k_pages.shape
        keys, size = requests.table.shape[1] * page_size, requests.layer.k_pages.element_size()
        return paged_decode.Split.of(len(requests.lengths), keys, kv_heads, width, size, requests.window, CPU)

    # rows alone; all shared; one long among short; as many rows as programs; a single token; more rows than programs
    LENGTHS = [[70, 3, 33], [1500, 900], [2000, 20, 5, 40, 17], [130] * 6, [1], [700] * 9, [1, 2500], [64, 128, 129]]

    @pytest.mark.parametrize("lengths", LENGTHS, ids=str)
    @pytest.mark.parametrize("window", [None, 9, 300])
    @pytest.mark.parametrize("sunk", [False, True])
    def test_equals_the_reference(lengths, window, sunk):
        sinks = torch.randn(6) if sunk else None
        result, expected = attend(lengths, window=window, sinks=sinks, heads=6, kv_heads=2, width=128, page_size=16)
        torch.testing.assert_close(result, expected, atol=2e-6, rtol=1e-5)

    @pytest.mark.parametrize("heads, kv_heads, width, page_size", [(5, 1, 80, 16), (4, 4, 64, 32), (8, 1, 24, 128), (2, 1, 512, 16)])
    @pytest.mark.parametrize("planned", [False, True])
    def test_of_any_shape_planned_before_or_not(heads, kv_heads, width, page_size, planned):
        geometry = {"heads": heads, "kv_heads": kv_heads, "width": width, "page_size": page_size}
        result, expected = attend([900, 3, 1, 77], planned=planned, **geometry)
        torch.testing.assert_close(result, expected, atol=5e-6, rtol=1e-5)

    @pytest.mark.parametrize("words", [{"chunk": 8}, {"chunk": 300}, {"alibi": 1.0}, {"alibi": 0.3, "chunk": 500}], ids=str)
    def test_in_chunks_and_with_biases_by_distance(words):
        result, expected = attend([600, 12, 305, 1], words=words, heads=6, kv_heads=2, width=32, page_size=16)
        torch.testing.assert_close(result, expected, atol=5e-6, rtol=1e-5)

    def test_caps_scores_reads_slices_and_runs_in_16_bits():
        result, expected = attend([600, 12], softcap=3.0, width=16)
        torch.testing.assert_close(result, expected, atol=5e-6, rtol=1e-5)

        def sliced(q):
            return torch.cat((q, torch.full_like(q, float("nan"))), dim=-1)[..., :16]

        result, expected = attend([600, 12], q=sliced, width=16)
        torch.testing.assert_close(result, expected, atol=5e-6, rtol=1e-5)
        result, expected = attend([600, 12], width=32, dtype=torch.float16)
        torch.testing.assert_close(result, expected, atol=2e-3, rtol=2e-3)

    @settings(deadline=None, max_examples=60)
    @given(
        lengths=st.lists(st.integers(1, 4000) | st.integers(1, 90), min_size=1, max_size=20),
        kv_heads=st.sampled_from([1, 2, 8]),
        window=st.none() | st.integers(1, 2000),
    )
    def test_every_tile_is_taken_once_and_no_run_is_longer_than_an_even_share(lengths, kv_heads, window):
        split = paged_decode.Split.of(len(lengths), 4096, kv_heads, 128, 4, window, CPU)
        if not split.queued:
            return
        plan = paged_decode.plan(torch.tensor(lengths).int(), split, window).tolist()
        runs, rest = [plan[n : n + 6] for n in range(0, 6 * split.programs, 6)], plan[6 * split.programs :]
        queued, short = rest[-2:]
        queue = [tuple(rest[n : n + 2]) for n in range(0, 2 * queued, 2)]
        firsts = [0 if window is None else max(0, length - window) // split.tile for length in lengths]
        tiles = [-(-length // split.tile) - first for length, first in zip(lengths, firsts)]
        assert queue == [(row, lengths[row]) for row, count in enumerate(tiles) if count > short]
        assert split.alone or queued == len(lengths)
        taken = []
        for place, _, _, offset, _, run in runs:
            left = run if place < queued else 0
            while left and place < queued:
                row, _ = queue[place]
                count = min(left, tiles[row] - offset)
                taken += [(row, offset + tile) for tile in range(count)]
                left, offset, place = left - count, 0, place + 1
        assert taken == [(row, tile) for row, _ in queue for tile in range(tiles[row])]
        longest = max((run for place, _, _, _, _, run in runs if place < queued), default=0)
        even, most = -(-sum(tiles) // split.programs), max(tiles)
        assert longest <= max(even + even // 4 + 2, 4, -(-most // 64))
