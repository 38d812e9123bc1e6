"""Page groups, pools and the prefix cache's rules, on their own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen.contract.state import Pages
from flexgen.runtime.requests.params import SamplingParams
from flexgen.runtime.requests.request import Request
from flexgen.runtime.requests.stops import StopRules
from flexgen.runtime.scheduling.pages import BlockTables, PagePool, block_hashes
from flexgen.runtime.scheduling.pools import Cache, PageGroup, group_pages, page_groups
from tests.runtime.test_engine import engine, run
from tests.runtime.toy import Toy

torch.set_num_threads(1)
STOPS = StopRules(None, frozenset(), (), False, 0, 100)


def request(tokens, slot=1):
    made = Request(slot, list(tokens), SamplingParams(), 0, STOPS)
    made.slot = slot
    return made


def computed(tables, tokens, root=b"r"):
    """A request whose tokens are all computed, cached and released again."""
    one = request(tokens)
    tables.begin(one, root)
    assert tables.grow(one, len(tokens))
    one.computed = len(tokens)
    tables.register(one)
    tables.release(one)


def test_layers_of_one_geometry_form_a_group_and_sharers_use_their_owners():
    state = {"a": Pages(2, 16), "b": Pages(2, 16, 8), "c": Pages(2, 16), "d": Pages(1, 32)}
    groups = page_groups([("a",), ("b",), ("c",), ("d",), ("b",)], state)
    assert [(group.layers, group.entries) for group in groups] == [
        ((0, 2), ("a", "c")), ((3,), ("d",)), ((1, 4), ("b",)),
    ]  # fmt: skip
    toy = Toy(kinds=("full", "sliding", "full", "shared"))
    (full, sliding) = page_groups(toy.mixers, toy.state)
    assert full.entries == ("full", "shared") and full.layers == (0, 2) and sliding.layers == (1,)
    Cache(toy, [full, sliding], [6, 3], 4, 2)
    assert toy.layers[3].k_pages is toy.layers[2].k_pages
    assert toy.layers[0].k_pages.shape == (7, 4, 2, 16) and toy.layers[1].v_pages.shape == (4, 4, 2, 16)


def test_page_bytes():
    assert PageGroup(Pages(2, 16), (0, 3), ("a",)).page_bytes(4, torch.bfloat16) == 2 * 2 * 4 * 2 * 16 * 2


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    window=st.integers(1, 20), block=st.integers(1, 9), slots=st.integers(1, 6), extra=st.integers(0, 30), seed=st.integers(0, 99)
)
def test_a_window_pool_never_holds_back_what_the_full_pool_allows(window, block, slots, extra, seed):
    toy = Toy(kinds=("full", "sliding"), window=window)
    llm = engine(
        toy, block_size=block, max_num_seqs=slots, num_gpu_blocks_override=slots * 64, max_num_batched_tokens=slots + extra
    )
    run(llm, [[(seed + i) % 61] * (1 + (seed * i) % 23) for i in range(8)], SamplingParams(max_tokens=9, ignore_eos=True))
    assert llm.metrics()["preemptions"] == 0


def test_window_pools_are_derived_from_the_full_one():
    groups = [PageGroup(Pages(1, 8), (0,), ("f",)), PageGroup(Pages(1, 8, 17), (1,), ("w",))]
    assert group_pages(groups, 1000, 16, max_num_seqs=4, max_num_batched_tokens=64) == [1000, 4 * 3 + 4]
    assert group_pages(groups, 10, 16, max_num_seqs=4, max_num_batched_tokens=64) == [10, 10]


def test_a_window_that_no_pool_can_hold_is_refused():
    llm = engine(Toy(kinds=("sliding",), window=9), block_size=4, num_gpu_blocks_override=3, max_num_batched_tokens=8)
    with pytest.raises(ValueError, match="take 5 blocks of 4 tokens, and there are 3"):
        run(llm, [[1] * 20], SamplingParams())


def test_a_pool_hands_out_the_least_recently_used_page_and_never_the_pad_page():
    pool = PagePool(3)
    first, second, third = (pool.take() for _ in range(3))
    assert sorted((first, second, third)) == [1, 2, 3] and pool.free == 0
    pool.register(first, b"a")
    pool.register(second, b"b")
    for page in (first, third, second):
        pool.give_back(page)
    assert pool.take() == third  # it holds nothing
    assert pool.take() == first and pool.find(b"a") is None and pool.find(b"b") == second
    pool.share(second)
    pool.share(second)
    pool.give_back(second)
    assert pool.free == 0
    with pytest.raises(AssertionError, match="given back twice"):
        pool.give_back(second)
        pool.give_back(second)


def test_a_block_is_named_by_its_whole_prefix_and_its_root():
    whole = block_hashes([], b"r", [1, 2, 3, 4, 5], 2)
    assert len(whole) == 2 and block_hashes(whole[:1], b"r", [1, 2, 3, 4, 5], 2) == whole[1:]
    assert block_hashes([], b"s", [1, 2, 3, 4], 2)[0] != whole[0]
    assert block_hashes([], b"r", [9, 9, 3, 4], 2)[1] != whole[1]


@pytest.mark.parametrize("length, blocks", [(8, 1), (9, 2), (10, 2), (12, 2), (13, 3)])
def test_a_full_hit_leaves_a_token_to_compute(length, blocks):
    tables = BlockTables([10], [None], 4, True)
    computed(tables, range(20))
    one = request(range(length))
    tables.begin(one, b"r")
    assert tables.cached_blocks(one) == blocks
    other = request(range(length))
    tables.begin(other, b"another version of the weights")
    assert tables.cached_blocks(other) == 0


def test_a_window_group_needs_only_the_blocks_that_the_next_token_sees():
    tables = BlockTables([20, 20], [None, 5], 4, True)
    computed(tables, range(32))
    window = tables.pools[1]
    one = request(range(30))
    tables.begin(one, b"r")

    def lose(*blocks):
        for block in blocks:
            window._forget(window._page_of[one.hashes[block]])

    lose(0, 1, 2)
    assert tables.cached_blocks(one) == 7  # block 6 covers the last 4 tokens before 28
    lose(6)
    assert tables.cached_blocks(one) == 6
    lose(5)
    assert tables.cached_blocks(one) == 5
    tables.adopt(one, 5)
    assert one.pages[1][:4] == [0, 0, 0, 0] and one.pages[1][4] != 0 and one.computed == 20
    lose_full = tables.pools[0]
    lose_full._forget(lose_full._page_of[one.hashes[2]])
    two = request(range(30), slot=2)
    tables.begin(two, b"r")
    assert tables.cached_blocks(two) == 0  # the full group holds 2 blocks, the window group neither of them
