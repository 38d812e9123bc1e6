"""Defines ops that torch's compiler takes as they are: one name, an implementation a device, and what the result looks like.

The other files of this room call `define_op` when they are imported. Ops are registered on a library directly, since
`torch.library.custom_op` spends tens of microseconds a call on checks that a step of many small ops feels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from inspect import Parameter, Signature
from itertools import islice
from typing import Any, Literal, get_origin, get_type_hints

import torch

_LIBRARY = torch.library.Library("flexgen", "FRAGMENT")


def define_op(
    name: str,
    *,
    cpu: Callable[..., Any],
    cuda: Callable[..., Any],
    fake: Callable[..., Any],
    mutates: Sequence[str] = (),
) -> None:
    """Define `torch.ops.flexgen.NAME`. `cpu`'s annotations are its schema; `fake` gives results without their values.

    A schema knows tensors, numbers and text. A parameter of `cpu` or `cuda` whose type is a dataclass stands for its fields
    there: the caller unpacks it with `flat`, the implementation gets it whole, and `fake` sees what the schema says.
    """
    cpu, cuda = _of_plain_arguments(cpu), _of_plain_arguments(cuda)
    _LIBRARY.define(name + torch.library.infer_schema(cpu, mutates_args=mutates))
    _LIBRARY.impl(name, cpu, "CPU")
    _LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"flexgen::{name}", fake, lib=_LIBRARY)


def flat(record: Any) -> tuple[Any, ...]:
    """The fields of a dataclass, in the order in which an op takes them."""
    return tuple(getattr(record, each.name) for each in fields(record))


def _of_plain_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as it is, or, where it takes dataclasses, of their fields in place of each."""
    kinds: dict[str, Any] = get_type_hints(function)
    result = kinds.pop("return")
    names = {name: _fields(kind) if is_dataclass(kind) else {name: kind} for name, kind in kinds.items()}
    if not any(map(is_dataclass, kinds.values())):
        return function
    made: list[tuple[Any, int]] = [(kind if is_dataclass(kind) else None, len(names[name])) for name, kind in kinds.items()]

    def run(*plain: Any) -> Any:
        rest = iter(plain)
        return function(*(next(rest) if record is None else record(*islice(rest, count)) for record, count in made))

    parameters = [
        Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
        for plain in names.values()
        for name, kind in plain.items()
    ]
    run.__signature__ = Signature(parameters, return_annotation=result)  # type: ignore[attr-defined]
    return run


def _fields(record: Any) -> dict[str, Any]:
    """Names and types of a dataclass's fields, as a schema can say them."""
    kinds = get_type_hints(record)
    return {each.name: str if get_origin(kinds[each.name]) is Literal else kinds[each.name] for each in fields(record)}
