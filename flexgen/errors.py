"""The errors that flexgen raises on purpose. Every message says what, where, the value, the limit and what to do."""

from __future__ import annotations


class FlexgenError(Exception):
    """Base of every error about what a user gave, or about what the machine could not do with it."""


class ConfigError(FlexgenError):
    """A checkpoint's config.json says something that the engine or the spec cannot serve."""
