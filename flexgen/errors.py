"""The base of every error that flexgen raises about what a user gave it."""


class FlexError(Exception):
    """A mistake in what the user gave: the message says what, where, the value, the limit and what to do."""
