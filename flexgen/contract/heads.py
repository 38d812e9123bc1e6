"""Which numbers of an entry must divide each other. The compiler checks `tiny` by it, generated code a checkpoint."""

from __future__ import annotations

from flexgen.errors import ConfigError

MULTIPLES = (("attention", "heads", "kv_heads"), ("gdn", "value_heads", "key_heads"))
"""A section of a spec, a field of its entries, and the field that it must be a multiple of."""


def is_multiple(many: int, few: int) -> bool:
    """Whether `few` heads can serve `many`."""
    return few >= 1 and many % few == 0


def check_heads(entry: str, **counts: int) -> None:
    """Raises ConfigError unless the first of two counts, given by name, is a multiple of the second."""
    (many_name, many), (few_name, few) = counts.items()
    if not is_multiple(many, few):
        raise ConfigError(f"{entry} gets {many} {many_name}, no multiple of its {few} {few_name}")
