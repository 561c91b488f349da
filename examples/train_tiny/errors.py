"""The one exception that the command line turns into a line of text."""

from __future__ import annotations

__all__ = ["TrainTinyError"]


class TrainTinyError(RuntimeError):
    """The run cannot go on; the message says what is wrong and what to do."""
