"""Decode by graphs on a host, where a graph is the code that it would hold, run again into the same tensors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexgen.errors import FlexgenError
from flexgen.runtime.execution import start
from flexgen.runtime.execution.graphs import Captured, Graphs, packed_shapes
from flexgen.runtime.execution.packed import Packed, Piece, Shape, numbers
from flexgen.runtime.ladder import ladder
from flexgen.runtime.requests.params import SamplingParams
from tests.runtime.test_engine import engine, run
from tests.runtime.toy import Toy


class Rerun:
    """Stands for a graph: a replay runs the code again, into the tensors of the first result."""

    def __init__(self, work, result):
        self.work, self.result = work, result

    def replay(self):
        fresh = self.work()
        if fresh is not None:
            self.result.__dict__.update(fresh.__dict__)


class HostGraphs(Graphs):
    """Captures nothing: everything but the capture itself is the real thing."""

    def _captured(self, what, run):
        self._addresses.update((name, tensor.data_ptr()) for name, tensor in self.step.tensors())
        result = run() if what.startswith("sampling") else None  # a capture runs nothing, but its result has to exist
        return Captured(Rerun(run, result), result)


def host_graphs(core, sizes, kind=HostGraphs, at_start=False):
    """Let an engine run by graphs that a host can replay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "Graphs", kind)
        core.runner.graphs = start.capture(core.runner.step, core.options, sizes, at_start)


def with_graphs(toy, sizes, at_start=False, **options):
    llm = engine(toy, **options)
    host_graphs(llm.llm_engine, sizes, at_start=at_start)
    return llm


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 33, 64, 100, 256, 257, 1000])
def test_a_ladder_ends_at_the_most_and_wastes_little(most):
    sizes = ladder(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    for batch in range(1, most + 1):
        size = next(size for size in sizes if size >= batch)
        assert size < batch * 1.5


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_padding_rows_and_nan_in_the_pad_page_change_nothing(count):
    toy = Toy(kinds=("full", "sliding", "recurrent"))
    prompts = [[5, 6, 7], [9], [1, 2, 3, 4, 5], [8, 8], [3], [4, 4, 4], [60], [7, 1]][:count]
    params = [SamplingParams(seed=3, temperature=i % 2, max_tokens=3 + i, ignore_eos=True) for i in range(count)]
    expected = [output.outputs[0].token_ids for output in run(engine(toy), prompts, params)]
    llm = with_graphs(toy, [1, 4, 16])
    for layer in toy.layers[:2]:
        layer.k_pages[0], layer.v_pages[0] = float("nan"), float("nan")
    toy.layers[2].memory[0] = float("nan")
    assert [output.outputs[0].token_ids for output in run(llm, prompts, params)] == expected
    assert llm.llm_engine.runner.graphs.failures == []


def test_features_that_come_late_get_graphs_of_their_own():
    toy = Toy()
    asked = [
        SamplingParams(temperature=0, max_tokens=6),
        SamplingParams(seed=1, top_k=3, max_tokens=6),
        SamplingParams(seed=2, repetition_penalty=1.3, logprobs=2, max_tokens=6),
        SamplingParams(seed=4, logit_bias={5: 4.0}, min_p=0.1, max_tokens=6),
    ]
    llm, plain = with_graphs(toy, [1, 2, 4]), engine(toy)
    for params in asked:
        mine, theirs = (run(each, [[1, 2, 3]] * 2, params) for each in (llm, plain))
        assert [o.outputs[0].token_ids for o in mine] == [o.outputs[0].token_ids for o in theirs]


@pytest.mark.parametrize("at_start", [False, True])
@pytest.mark.parametrize("lengths", [(2,), (3, 1), (12, 1, 5), (7, 7, 7, 7), (40, 2), (60, 1, 1)])
def test_steps_with_prompts_replay_too(lengths, at_start):
    toy = Toy(kinds=("full", "sliding", "recurrent"))
    prompts = [[(3 * row + place) % 61 for place in range(length)] for row, length in enumerate(lengths)]
    params = [SamplingParams(seed=row, temperature=row % 2, max_tokens=2 + row, ignore_eos=True) for row in range(len(prompts))]
    expected = [output.outputs[0].token_ids for output in run(engine(toy), prompts, params)]
    llm = with_graphs(toy, [1, 2, 4, 16], at_start, max_num_seqs=16)
    assert not toy.layers[2].memory.any()  # captures leave state as it was
    toy.layers[2].memory[0] = float("nan")
    assert [output.outputs[0].token_ids for output in run(llm, prompts, params)] == expected
    graphs = llm.llm_engine.runner.graphs
    assert graphs.failures == []
    if not at_start:
        assert any(isinstance(key, Shape) for key in graphs._forwards) == (sum(lengths) < 61)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(1, 64))
def test_a_shape_is_filled_exactly_or_not_at_all(counts, longest):
    pieces = [Piece(row + 1, 5, (7,) * count) for row, count in enumerate(counts)]
    for shape in packed_shapes(512, 64, 16):
        filled = shape.fill(pieces, longest)
        if filled is not None:
            assert filled[: len(pieces)] == pieces and Shape.of(filled) == shape
            assert all(piece.slot == 0 and 1 <= len(piece.ids) <= longest for piece in filled[len(pieces) :])
            flat = torch.tensor(numbers(filled, (0,)))
            assert len(flat) == shape.numbers
            packed = Packed.of(flat, shape)
            assert packed.starts_R.diff().tolist() == [len(piece.ids) for piece in filled]
            assert packed.lengths_R[: len(pieces)].tolist() == [5 + count for count in counts]
            assert packed.rows_T.bincount().tolist() == packed.starts_R.diff().tolist()
            assert packed.ids_T.tolist() == [token for piece in filled for token in piece.ids]
            assert packed.positions_T.tolist() == [piece.start + i for piece in filled for i in range(len(piece.ids))]
            assert packed.slots_R.tolist() == [piece.slot for piece in filled]


def test_a_weight_that_moved_is_named():
    toy = Toy()
    llm = with_graphs(toy, [1, 2])
    run(llm, [[1, 2]], SamplingParams(max_tokens=3))
    toy.layers[0].k_pages = toy.layers[0].k_pages.clone()
    toy.weight_version += 1
    with pytest.raises(FlexgenError, match="layer 0's k_pages, which moved"):
        run(llm, [[1, 2]], SamplingParams(max_tokens=3))


class Uncapturable(HostGraphs):
    """The forward pass of 2 rows replays to something else, and sampling of 4 rows cannot be captured."""

    def _captured(self, what, run):
        if what.startswith("sampling 4 rows"):
            return self._fail(what, "operation not permitted when stream is capturing")
        captured = super()._captured(what, run)
        if what == "decode of 2 rows":
            captured.graph.replay = lambda: self.logits_SV.fill_(7.0)
        return captured


def test_what_has_no_graph_still_runs_and_the_report_lists_it():
    toy = Toy()
    llm, plain = engine(toy), engine(toy)
    assert "decode: without graphs" in llm.report().splitlines()
    host_graphs(llm.llm_engine, [1, 2, 4], Uncapturable)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for batch in ([[1, 2]], [[1, 2], [3]], [[1, 2], [3], [4, 5, 6]]):
        mine, theirs = (run(each, batch, params) for each in (llm, plain))
        assert [o.outputs[0].token_ids for o in mine] == [o.outputs[0].token_ids for o in theirs]
    start, decode, forward, sampling = llm.report().splitlines()[-4:]
    assert start == "start-up: load 0.0 s, compile 0.0 s, capture 0.0 s"
    assert decode == "decode: graphs of 1, 2, 4 rows"
    assert forward == (
        "decode of 2 rows runs without a graph: its replay differs from the same code run directly"
    )
    assert sampling.startswith("sampling 4 rows with Features(") and sampling.endswith("when stream is capturing")
