"""Rows of a package's weight tables: which tensors of a checkpoint fill which weight, of what shape, in what order.

Generated code calls the constructors; the loader, adapters and `verify` read the rows. Names in the table of a layer are
below the layer, as adapters have them: `below` puts the layer before them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["linear", "router", "embedding", "experts", "convolution", "vector", "bias", "head"]


@dataclass(frozen=True)
class Part:
    """One tensor of the checkpoint (`*` stands for the layer index) and the rows, dim 0, that it fills of its weight.

    blocks  of a tensor that holds several things: the outputs of each, end to end in each of `groups` equal parts
    """

    name: str
    rows: int
    blocks: tuple[int, ...] = ()
    groups: int = 1


@dataclass(frozen=True)
class Stacked:
    """One tensor holds all experts, as it lies in memory (`transpose` swaps its last two dims on the way in)."""

    name: str
    transpose: bool = False


@dataclass(frozen=True)
class PerExpert:
    """One tensor an expert and part; the second `*` of each name is the expert. Parts are stacked on dim 1."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Mxfp4:
    """`NAME_blocks` and `NAME_scales`, 4-bit values in groups of 32, dequantised on load to (expert, in, out)."""

    name: str


ExpertLayout = Stacked | PerExpert | Mxfp4


@dataclass(frozen=True)
class Weight:
    """One tensor of the engine: an attribute of a `Layer`, in transformers' layout.

    Exactly one of `parts` (tensors of the checkpoint end to end on dim 0) and `layouts` (forms an expert tensor may have
    in the file, exactly one of which must match) is given. `fp32` keeps the tensor in fp32 whatever the model's dtype.
    `same_as` names the weight whose storage this one shares (a tied head).

    kind        what it is for
    axes        what each dim counts; "" where that is the stream, or nothing that could be divided
    modules     what adapters call its parts; of experts the stacked parameter, then modules of one expert, `*`
    transposed  linear modules and experts lie as (in, out), else as (out, in)
    routes      of a router: where a layer leaves each token's experts on request, and how many it chooses
    """

    role: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...] = ()
    layouts: tuple[ExpertLayout, ...] = ()
    fp32: bool = False
    same_as: str | None = None
    present: bool = True
    kind: Kind = "linear"
    axes: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    transposed: bool = False
    routes: tuple[str, int] | None = None


@dataclass(frozen=True)
class Packed:
    """The outputs of one module that holds several things: those of each, end to end in each of `groups` equal parts."""

    blocks: tuple[int, ...]
    groups: int

    @property
    def rows(self) -> int:
        """Outputs of the module."""
        return sum(self.blocks)


def packed(*blocks: int, groups: int = 1) -> Packed:
    """Queries, keys and values, or gate and up, of one module."""
    return Packed(blocks, groups)


def _part(name: str, outputs: int | Packed) -> Part:
    return Part(name, outputs.rows, outputs.blocks, outputs.groups) if isinstance(outputs, Packed) else Part(name, outputs)


def linear(
    role: str,
    rows: Mapping[str, int | Packed],
    columns: int,
    *,
    out: str = "",
    into: str = "",
    bias: bool | None = None,
    fp32: bool = False,
    kind: Kind = "linear",
    transposed: bool = False,
) -> list[Weight]:
    """Linear modules end to end, each with its rows, and their biases: None where there are none, else whether they are there.

    `out` and `into` say what the rows and the columns count: heads, inner, vocab, experts. `transposed` says that the one
    module lies as (columns, rows).
    """
    parts = tuple(_part(f"{module}.weight", count) for module, count in rows.items())
    total = sum(part.rows for part in parts)
    weight = Weight(role, (total, columns), parts, fp32=fp32, kind=kind, axes=(out, into), modules=tuple(rows))
    if transposed:
        (part,) = parts
        parts = (replace(part, rows=columns),)
        weight = replace(weight, shape=(columns, total), parts=parts, axes=(into, out), transposed=True)
    if bias is None:
        return [weight]
    parts = tuple(_part(f"{module}.bias", count) for module, count in rows.items())
    return [weight, Weight(f"{role}_bias", (total,), parts, present=bias, fp32=fp32, kind="bias", axes=(out,))]


def router(
    role: str,
    rows: Mapping[str, int],
    columns: int,
    routed: str,
    top_k: int,
    *,
    bias: bool | None = None,
    fp32: bool = False,
) -> list[Weight]:
    """The linear module that scores experts, of which `top_k` are chosen. No adapter changes it."""
    weight, *biases = linear(role, rows, columns, out="experts", bias=bias, fp32=fp32, kind="router")
    return [replace(weight, routes=(routed, top_k)), *biases]


def embedding(role: str, vocab: int, columns: int, module: str | None = None, *, fp32: bool = False) -> Weight:
    """A table of one row a token. Here and below the module is called like the role where no name is given."""
    (weight,) = linear(role, {module or role: vocab}, columns, out="vocab", fp32=fp32, kind="embedding")
    return weight


def positions(role: str, length: int, columns: int, module: str | None = None, *, fp32: bool = False) -> Weight:
    """A table of one row a position."""
    (weight,) = linear(role, {module or role: length}, columns, fp32=fp32, kind="embedding")
    return weight


def head(
    role: str, vocab: int, columns: int, module: str | None = None, *, same_as: str | None = None, fp32: bool = False
) -> Weight:
    """The linear module that makes logits; tied, it is the embedding `same_as`."""
    (weight,) = linear(role, {module or role: vocab}, columns, out="vocab", fp32=fp32, kind="head")
    return replace(weight, same_as=same_as)


def norm(role: str, size: int, module: str | None = None, *, of: str = "", fp32: bool = False) -> Weight:
    """The gain of a norm's module; `of` says what it counts."""
    return vector(role, size, f"{module or role}.weight", of=of, fp32=fp32)


def head_norm(role: str, heads: int, width: int, module: str, *, fp32: bool = False) -> Weight:
    """The gain of a norm over each head, of which every head has its own."""
    parts = (Part(f"{module}.weight", heads),)
    return Weight(role, (heads, width), parts, fp32=fp32, kind="vector", axes=("heads", ""))


def vector(role: str, size: int, tensor: str | None = None, *, of: str = "", fp32: bool = False) -> Weight:
    """A tensor of one dim that multiplies; `of` says what it counts."""
    return Weight(role, (size,), (Part(tensor or role, size),), fp32=fp32, kind="vector", axes=(of,))


def bias(
    role: str, shape: tuple[int, ...], tensor: str, *, axes: tuple[str, ...], present: bool = True, fp32: bool = False
) -> Weight:
    """A tensor that is added, where no linear module of one tensor has it."""
    return Weight(role, shape, (Part(tensor, shape[0]),), present=present, fp32=fp32, kind="bias", axes=axes)


def scalar(role: str, tensor: str, *, fp32: bool = False) -> Weight:
    """A tensor of one number, without dims."""
    return Weight(role, (), (Part(tensor, 1),), fp32=fp32, kind="vector", axes=())


def convolution(role: str, channels: int, kernel: int, module: str, *, fp32: bool = False) -> Weight:
    """One filter a channel."""
    shape = (channels, 1, kernel)
    return Weight(role, shape, (Part(f"{module}.weight", channels),), fp32=fp32, kind="convolution", axes=("heads", "", ""))


def experts(
    role: str, count: int, out: tuple[str, int], into: tuple[str, int], *layouts: ExpertLayout, transposed: bool = False
) -> Weight:
    """A matrix an expert: what its two dims count, and how many; the layouts that a file may have."""
    matrix = (into, out) if transposed else (out, into)
    stacked = next(layout.name for layout in layouts if isinstance(layout, Stacked))
    single = [name.removesuffix(".weight") for layout in layouts if isinstance(layout, PerExpert) for name in layout.names]
    return Weight(
        role,
        (count, *(size for _, size in matrix)),
        layouts=layouts,
        kind="experts",
        axes=("experts", *(axis for axis, _ in matrix)),
        modules=(stacked, *single),
        transposed=transposed,
    )


def below(place: str, weight: Weight) -> Weight:
    """A row of a layer's table with the layer before the names of its tensors: `layers.*`."""
    parts = tuple(replace(part, name=f"{place}.{part.name}") for part in weight.parts)
    layouts = tuple(
        replace(layout, names=tuple(f"{place}.{name}" for name in layout.names))
        if isinstance(layout, PerExpert)
        else replace(layout, name=f"{place}.{layout.name}")
        for layout in weight.layouts
    )
    return replace(weight, parts=parts, layouts=layouts)
