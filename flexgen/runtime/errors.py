"""The errors a user of the runtime can meet. Every message says what, where, the value, the limit and what to do."""

from __future__ import annotations

from flexgen.errors import FlexError


class FlexgenError(FlexError):
    """Base of every error that flexgen raises on purpose."""


class ConfigError(FlexgenError):
    """A checkpoint's config.json says something that the engine or the spec cannot serve."""
