"""Rows of weight tables, as calls of the constructors in `flexgen.contract.weights`, of the same names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from flexgen.ir.architecture import Row
from flexgen.ir.code import Size

Flag = bool | Size
"""Settled by the spec, or by the checkpoint."""

Modules = Sequence[tuple[str, Size | str]]
"""Linear modules end to end, each with its rows: a number of them, or code for what a module holds."""


def packed(*blocks: Size, groups: Size | None = None) -> str:
    """Rows of a module that holds several things."""
    return f"weights.packed({', '.join(map(str, blocks))}{f', groups={groups}' if groups else ''})"


class Rows:
    """Makes the rows of a table whose tensors are below `place`: a layer, or nothing for the model's own.

    `fp32` names tensors whose weights stay in fp32, `transposed` linear modules that lie as (in, out).
    """

    def __init__(self, place: str = "", fp32: Sequence[str] = (), transposed: Sequence[str] = ()) -> None:
        self.place = place
        self.fp32 = frozenset(fp32)
        self.transposed = frozenset(transposed)

    def _row(self, role: str, make: str, arguments: tuple[str, ...], tensors: Sequence[str], **fields: Any) -> Row:
        names = tuple(self.place + tensor for tensor in tensors)
        roles = fields.pop("roles", (role,))
        return Row(roles, make, arguments, names, fp32=not self.fp32.isdisjoint(names), **fields)

    def linear(
        self, role: str, rows: Modules, columns: Size, out: str = "", into: str = "", bias: Flag = False
    ) -> Row:
        """A weight of linear modules, and its bias where there can be one."""
        options = [f'{name}="{axis}"' for name, axis in (("out", out), ("into", into)) if axis]
        options += [f"bias={bias}"] if bias is not False else []
        transposed = any(self.place + module in self.transposed for module, _ in rows)
        options += ["transposed=True"] if transposed else []
        tensors = [f"{module}.weight" for module, _ in rows]
        tensors += [f"{module}.bias" for module, _ in rows] if bias is not False else []
        roles = (role, f"{role}_bias") if bias is not False else (role,)
        return self._row(
            role,
            "linear",
            (str(columns), *options),
            tensors,
            roles=roles,
            rows=tuple(rows),
            merge="merge_linear",
            is_list=True,
            transposed=transposed,
        )

    def router(self, role: str, rows: Modules, columns: Size, routed: str, top_k: Size, bias: Flag = False) -> Row:
        """The weight that scores experts, how many are chosen, and where on request a layer leaves them."""
        row = self.linear(role, rows, columns, bias=bias)
        columns_code, *rest = row.arguments
        arguments = (columns_code, f'"{routed}"', str(top_k), *rest)
        return replace(row, make="router", arguments=arguments, merge=None)

    def embedding(self, role: str, vocab: Size, columns: Size, module: str) -> Row:
        arguments = (str(vocab), str(columns), *_unless(role, module))
        return self._row(role, "embedding", arguments, (f"{module}.weight",), merge="merge_linear")

    def head(self, role: str, vocab: Size, columns: Size, module: str, tied: Flag, same_as: str) -> Row:
        same = [] if tied is False else [f'same_as="{same_as}"' + (f" if {tied} else None" if tied is not True else "")]
        arguments = (str(vocab), str(columns), *_unless(role, module), *same)
        return self._row(role, "head", arguments, (f"{module}.weight",), merge="merge_linear")

    def norm(self, role: str, size: Size, module: str, of: str = "") -> Row:
        options = (f'of="{of}"',) if of else ()
        return self._row(role, "norm", (str(size), *_unless(role, module), *options), (f"{module}.weight",))

    def head_norm(self, role: str, heads: Size, width: Size, module: str) -> Row:
        return self._row(role, "head_norm", (str(heads), str(width), f'"{module}"'), (f"{module}.weight",))

    def positions(self, role: str, length: Size, columns: Size, module: str) -> Row:
        arguments = (str(length), str(columns), *_unless(role, module))
        return self._row(role, "positions", arguments, (f"{module}.weight",))

    def scalar(self, role: str, tensor: str) -> Row:
        return self._row(role, "scalar", (f'"{tensor}"',), (tensor,))

    def vector(self, role: str, size: Size, tensor: str, of: str = "") -> Row:
        options = (f'of="{of}"',) if of else ()
        return self._row(role, "vector", (str(size), *_unless(role, tensor), *options), (tensor,))

    def bias(self, role: str, shape: Sequence[Size], tensor: str, axes: Sequence[str], present: Flag = True) -> Row:
        code, names = _tuple(map(str, shape)), _tuple(f'"{axis}"' for axis in axes)
        options = () if present is True else (f"present={present}",)
        return self._row(role, "bias", (code, f'"{tensor}"', f"axes={names}", *options), (tensor,))

    def convolution(self, role: str, channels: Size, kernel: Size, module: str) -> Row:
        arguments = (str(channels), str(kernel), f'"{module}"')
        return self._row(role, "convolution", arguments, (f"{module}.weight",))

    def experts(
        self, role: str, count: Size, out: tuple[str, Size], into: tuple[str, Size], layouts: Sequence[str], transposed: bool
    ) -> Row:
        dims = [f'("{axis}", {size})' for axis, size in (out, into)]
        options = ["transposed=True"] if transposed else []
        return self._row(role, "experts", (str(count), *dims, *layouts, *options), (), merge="merge_stacked")


def _unless(role: str, name: str) -> list[str]:
    """A checkpoint's name, where it is not the role's own."""
    return [] if name == role else [f'"{name}"']


def _tuple(items: Iterable[str]) -> str:
    listed = list(items)
    return f"({', '.join(listed)}{',' if len(listed) == 1 else ''})"
