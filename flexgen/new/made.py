"""What a draft takes from the config that it is made for: defaults from its class, and `tiny` from its values, made small."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flexgen.contract.configs import broken_fence, look, normalise
from flexgen.new.config import Given
from flexgen.spec.load import Spec


def class_defaults(spec: Spec, model_type: str) -> dict[str, Any] | None:
    """What transformers' config class fills in for the fields that a spec has defaults or fences for, and its flags.

    What the class lacks, or the spec's fences rule out, stays as it is: the draft is marked there. None where transformers has
    no such class, or one that cannot be made without values.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING  # seconds of import that other drafts do not pay

    if model_type not in CONFIG_MAPPING:
        return None
    try:
        filled = normalise(CONFIG_MAPPING[model_type]().to_dict(), None)
    except (ValueError, StrictDataclassError):  # a class that has no values to begin with
        return None
    checkpoint = spec.model.checkpoint
    named = {*checkpoint.defaults, *checkpoint.require}
    flags = {text for text in spec.model.dims.values() if isinstance(look(filled, text), bool | float)}
    fenced = {field for field in checkpoint.require if broken_fence(filled, {field: checkpoint.require[field]})}
    wanted = [*checkpoint.defaults, *sorted((named | flags) - checkpoint.defaults.keys())]
    taken = {field: filled[field] for field in wanted if filled.get(field) is not None and field not in fenced}
    return {field: {**checkpoint.defaults, **taken}[field] for field in wanted if field in taken or field in checkpoint.defaults}


def small(spec: Spec, given: Given) -> dict[str, Any]:
    """The fields of `tiny` that the config says otherwise: its flags, names, factors and kinds of layers; sizes stay small."""
    tiny, changed = spec.model.tiny, {}
    for field, value in tiny.items():
        stated = given.text.get(field)
        if field == "model_type" or stated is None or type(stated) is not type(value):
            continue
        if isinstance(stated, list) and isinstance(value, list):
            stated = _shortened(stated, len(value))
        elif isinstance(stated, int) and not isinstance(stated, bool):
            continue
        if stated != value:
            changed[field] = stated
    return changed


def _shortened(values: Sequence[Any], length: int) -> list[Any]:
    """The first so many of a list of layers, the last ones giving way to kinds that come later."""
    first = list(values[:length])
    later = [value for value in dict.fromkeys(map(_plain, values)) if value not in map(_plain, first)]
    for place, value in zip(range(length - 1, -1, -1), reversed(later)):
        first[place] = value
    return first


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value

