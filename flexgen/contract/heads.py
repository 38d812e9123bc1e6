"""Which numbers of heads and groups of experts fit each other. The compiler checks `tiny` by it, generated code a checkpoint."""

from __future__ import annotations

from flexgen.errors import ConfigError

MULTIPLES = (("attention", "heads", "kv_heads"), ("gdn", "value_heads", "key_heads"))
"""A section of a spec, a field of its entries, and the field that it must be a multiple of."""

BEST = {"best_two": 2, "best": 1}
"""How many scores of a group of experts make its rank, by the word of the spec."""


def is_multiple(many: int, few: int) -> bool:
    """Whether `few` heads can serve `many`."""
    return few >= 1 and many % few == 0


def groups_fault(experts: int, groups: int, keep: int, best: int, top_k: int) -> str | None:
    """What is wrong with experts in groups of which a token may use some, None where nothing is."""
    if not is_multiple(experts, groups):
        return f"{experts} experts do not make {groups} equal groups"
    if not 1 <= keep <= groups:
        return f"{keep} of {groups} groups of experts are kept, which must be at least 1 and at most all"
    if experts // groups < best:
        return f"a group of {experts // groups} experts is ranked by its {best} best"
    if keep * (experts // groups) < top_k:
        return f"{keep} groups of {experts // groups} experts are kept, and a token chooses {top_k}"
    return None


def check_groups(entry: str, *, experts: int, groups: int, keep: int, best: int, top_k: int) -> None:
    """Raises ConfigError unless experts make equal groups, and the kept ones have as many as a token chooses."""
    fault = groups_fault(experts, groups, keep, best, top_k)
    if fault:
        raise ConfigError(f"{entry}: {fault}")


def widths_fault(head_dim: int, value_dim: int) -> str | None:
    """What is wrong with values of a width of their own: pages have the width of keys."""
    fits = 1 <= value_dim <= head_dim
    return None if fits else f"values of width {value_dim}, which must be at least 1 and at most its head_dim, {head_dim}"


def check_widths(entry: str, *, head_dim: int, value_dim: int) -> None:
    """Raises ConfigError for values that are wider than keys."""
    fault = widths_fault(head_dim, value_dim)
    if fault:
        raise ConfigError(f"{entry} has {fault}")


def check_heads(entry: str, **counts: int) -> None:
    """Raises ConfigError unless the first of two counts, given by name, is a multiple of the second."""
    (many_name, many), (few_name, few) = counts.items()
    if not is_multiple(many, few):
        raise ConfigError(f"{entry} gets {many} {many_name}, no multiple of its {few} {few_name}")
