"""The base of a generated `Dims`: numbers that are bound once, and compare by value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self


class Numbers:
    """What one checkpoint's config.json binds. An attribute is set once, by the constructor."""

    kinds: tuple[str, ...]

    def __init__(self, raw: Mapping[str, Any], ignore: tuple[str, ...] = ()) -> None:
        raise NotImplementedError(f"{type(self).__name__} is generated, and binds its numbers itself")

    @classmethod
    def from_config(cls, raw: Mapping[str, Any], ignore: tuple[str, ...] = ()) -> Self:
        """Bind the numbers to a config.json; `ignore` names fields to pass over. Raises ConfigError for what does not fit."""
        return cls(raw, ignore)

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dict__:
            raise AttributeError(f"{name} is bound to {self.__dict__[name]!r}, and does not change")
        super().__setattr__(name, value)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash(tuple(self.__dict__.items()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"
