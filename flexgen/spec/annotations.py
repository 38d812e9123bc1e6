"""Which model, and which annotation, describes the value at a path of a spec. Diagnostics, `explain` and editors' help ask."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Discriminator, Tag

from flexgen.spec.diagnostics import SpecPath
from flexgen.spec.models import SpecModel


def value_at(data: Any, path: SpecPath) -> Any:
    """The value at a path that exists."""
    for element in path:
        data = data[element]
    return data


def field_names(model: type[BaseModel]) -> list[str]:
    """The fields as a file writes them."""
    return [info.alias or name for name, info in model.model_fields.items()]


def annotation_at(path: SpecPath, data: Any) -> Any:
    """The type annotation of the value at a path; unions are settled by the data."""
    annotation: Any = SpecModel
    node = data.document.data if hasattr(data, "document") else data
    for element in path:
        annotation = _settle(annotation, node)
        model = model_class(annotation)
        if model is not None:
            names = {info.alias or name: info for name, info in model.model_fields.items()}
            info = names.get(str(element))
            if info is None:
                return Any
            annotation = _full(info)
        else:
            arguments = get_args(bare_annotation(annotation))
            annotation = arguments[-1] if arguments else Any
        node = node[element] if isinstance(node, dict | list) else None  # type: ignore[index]
    return _settle(annotation, node)


def _full(info: Any) -> Any:
    """A field's annotation with its metadata, as it was written in the class."""
    metadata = [*info.metadata, *([info.discriminator] if info.discriminator else [])]
    return Annotated[info.annotation, *metadata] if metadata else info.annotation


def model_at(path: SpecPath, data: Any) -> type[BaseModel] | None:
    """The model that describes the mapping at a path."""
    return model_class(annotation_at(path, data))


def literals_at(path: SpecPath, data: Any) -> list[Any]:
    """The values that a field with a closed set of them takes."""
    return list(_literals(annotation_at(path, data)))


def _literals(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Literal:
        yield from (value for value in get_args(annotation) if value is not None)
    else:
        for argument in get_args(annotation):
            yield from _literals(argument)


def bare_annotation(annotation: Any) -> Any:
    """An annotation without the constraints around it."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation


def model_class(annotation: Any) -> type[BaseModel] | None:
    """The model that an annotation takes, optional or not; None if it takes none."""
    annotation = bare_annotation(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType):
        return next((model for model in map(model_class, get_args(annotation)) if model is not None), None)
    return None


def _settle(annotation: Any, node: Any) -> Any:
    """The member of a tagged union that the data chose; any other annotation as it is."""
    found = annotation
    while get_origin(found) is Annotated:
        inner, *metadata = get_args(found)
        chooser = next((item for item in metadata if isinstance(item, Discriminator)), None)
        if chooser is not None:
            tag = chooser.discriminator(node)  # type: ignore[operator]
            return next((member for member in get_args(inner) if _tag(member) == tag), annotation)
        found = inner
    return annotation


def _tag(member: Any) -> str | None:
    return next((item.tag for item in getattr(member, "__metadata__", ()) if isinstance(item, Tag)), None)


def tags_at(path: SpecPath, data: Any) -> list[str]:
    annotation = annotation_at(path, data)
    while get_origin(annotation) is Annotated and not any(_tag(member) for member in get_args(get_args(annotation)[0])):
        annotation = get_args(annotation)[0]
    members = typing.get_args(get_args(annotation)[0]) if get_origin(annotation) is Annotated else ()
    return [tag.removeprefix("form:") for tag in map(_tag, members) if tag]
