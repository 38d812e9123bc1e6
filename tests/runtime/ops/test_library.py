"""Ops whose arguments travel to torch in one piece and arrive in one piece."""

from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from torch import Tensor

from flexgen.runtime.ops.library import define_op, flat


@dataclass(frozen=True)
class Scale:
    by: Tensor
    direction: Literal["up", "down"]
    plus: float | None


def scaled(x: Tensor, scale: Scale, times: int) -> Tensor:
    assert isinstance(scale, Scale)
    factor = scale.by if scale.direction == "up" else 1 / scale.by
    return x * factor * times + (scale.plus or 0.0)


def scaled_fake(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


define_op("test_scaled", cpu=scaled, cuda=scaled, fake=scaled_fake)


def test_a_schema_lists_the_fields_of_a_dataclass_where_it_stands():
    schema = str(torch.ops.flexgen.test_scaled.default._schema)
    assert schema.endswith("(Tensor x, Tensor by, str direction, float? plus, SymInt times) -> Tensor")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("scale, expected", [(("up", None), 12.0), (("down", 1.0), 4.0)])
def test_the_implementation_gets_the_dataclass_whole(compiled, scale, expected):
    def call(x, by):
        return torch.ops.flexgen.test_scaled(x, *flat(Scale(by, *scale)), 2)

    run = torch.compile(call, fullgraph=True, backend="eager") if compiled else call
    assert run(torch.tensor([3.0]), torch.tensor([2.0])).tolist() == [expected]
