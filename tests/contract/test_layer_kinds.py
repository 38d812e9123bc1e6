"""The selectors of a schedule: which layers each reaches, and what they refuse."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen.contract import layer_kinds as schedule
from flexgen.errors import ConfigError

DEPTH = st.integers(1, 40)
COUNT = st.integers(0, 50)
SELECTORS = {
    "first": (schedule.first, lambda n, layers: range(min(n, layers))),
    "last": (schedule.last, lambda n, layers: range(max(layers - n, 0), layers)),
    "since": (schedule.since, lambda n, layers: range(min(n, layers), layers)),
}


def chosen(layers: int, rule: schedule.Rule) -> list[int]:
    kinds = schedule.resolve(layers, (schedule.everywhere("a"), rule))
    return [index for index, kind in enumerate(kinds) if kind == "b"]


@pytest.mark.parametrize("name", SELECTORS)
@given(layers=DEPTH, n=COUNT)
def test_ends_of_the_stack(name, layers, n):
    rule, wanted = SELECTORS[name]
    assert chosen(layers, rule(n, "b")) == list(wanted(n, layers))


@given(layers=DEPTH, n=st.integers(1, 50))
def test_every_counts_from_one(layers, n):
    assert [index + 1 for index in chosen(layers, schedule.every(n, "b"))] == list(range(n, layers + 1, n))


@given(layers=DEPTH, indices=st.sets(st.integers(0, 39)))
def test_at_takes_the_listed_indices(layers, indices):
    assert chosen(layers, schedule.at(sorted(indices), "b")) == sorted(i for i in indices if i < layers)


@given(values=st.lists(st.sampled_from(["x", "y"]), min_size=1, max_size=30))
def test_by_follows_the_list(values):
    kinds = schedule.resolve(len(values), (schedule.by(values, {"x": "a", "y": "b"}),))
    assert kinds == tuple({"x": "a", "y": "b"}[value] for value in values)


def test_pattern_repeats():
    assert schedule.resolve(5, (schedule.pattern(("a", "b")),)) == ("a", "b", "a", "b", "a")


def test_later_rules_rewrite_what_earlier_ones_chose():
    rules = (schedule.pattern(("a", "b", "c")), schedule.last(4, {"a": "A", "b": "B"}))
    assert schedule.resolve(6, rules) == ("a", "b", "c", "A", "B", "c")


RULES_OF_N = (schedule.every, schedule.first, schedule.last, schedule.since)


@pytest.mark.parametrize("rule", [*RULES_OF_N, schedule.at])
def test_an_absent_field_leaves_the_rule_out(rule):
    assert chosen(4, rule(None, "b")) == []


@pytest.mark.parametrize("when", [None, False, 0])
def test_a_false_condition_leaves_the_rule_out(when):
    rules = [rule(1, "b", when=when) for rule in RULES_OF_N]
    rules += [schedule.everywhere("b", when=when), schedule.at([0], "b", when=when)]
    rules += [schedule.pattern(("b",), when=when), schedule.by(["x"] * 4, {"x": "b"}, when=when)]
    assert [chosen(4, rule) for rule in rules] == [[]] * len(rules)


def test_a_layer_without_a_kind_is_named():
    with pytest.raises(ConfigError, match="layer 2 of 4"):
        schedule.resolve(4, (schedule.first(2, "a"),))


@pytest.mark.parametrize("rule", RULES_OF_N)
@pytest.mark.parametrize("value", [-1, True, "2", 1.5])
def test_counts_are_whole_numbers(rule, value):
    with pytest.raises(ConfigError, match=repr(value)):
        rule(value, "b")


def test_every_zero_is_refused():
    with pytest.raises(ConfigError, match="at least 1"):
        schedule.every(0, "b")


@pytest.mark.parametrize("values, message", [(["x"], "1 layer types for 2"), (["x", "z"], "'z'"), ("xx", "list"), (["x", 1], "1")])
def test_by_refuses_what_it_cannot_place(values, message):
    with pytest.raises(ConfigError, match=message):
        schedule.resolve(2, (schedule.by(values, {"x": "a"}),))


@pytest.mark.parametrize("indices", [3, "0", [True], [-1], ["0"]])
def test_at_refuses_what_is_no_list_of_indices(indices):
    with pytest.raises(ConfigError):
        schedule.at(indices, "b")


def test_by_reads_texts_numbers_and_flags():
    for values in ([0, 1, 1], [False, True, True], ["0", "1", "1"]):
        kinds = {"0": "a", "1": "b", "false": "a", "true": "b"}
        assert schedule.resolve(3, (schedule.by(values, kinds),)) == ("a", "b", "b")
    for value in (2, None, [0], 1.0):
        with pytest.raises(ConfigError, match="layer 0 has type"):
            schedule.resolve(1, (schedule.by([value], {"1": "b"}),))


def test_lists_of_two_slots_cross():
    slots = {
        "attention": (schedule.pattern(("full", "sliding")),),
        "feed_forward": (schedule.everywhere("sparse"), schedule.first(1, "dense")),
    }
    assert schedule.crossed(3, slots) == ("full_dense", "sliding_sparse", "full_sparse")
    with pytest.raises(ConfigError, match="layer 1 of 3 gets no kind of feed_forward from the schedule"):
        schedule.crossed(3, {**slots, "feed_forward": (schedule.first(1, "dense"),)})
