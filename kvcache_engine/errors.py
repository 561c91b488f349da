"""The engine's errors; each is an ``ml.MLError`` and a ValueError, and its message is one line."""

from __future__ import annotations

from numbers import Integral

from ml_kvcache import hidden

for _name in ("ml", "kvcache"):  # here, since the engine imports this first
    if _reason := hidden(_name):
        raise ImportError(f"kvcache_engine: {_reason}", name=_name)

from ml import MLError  # noqa: E402

__all__ = ["CapacityError", "ModelError", "RequestError", "RunnerError", "TextTooLongError", "check_whole"]


class RunnerError(MLError, ValueError):
    """Base class of the engine's errors."""


class ModelError(RunnerError):
    """A model folder, configuration, tokenizer or weights file that cannot be used."""


class RequestError(RunnerError):
    """A prompt or a sampling setting outside its limits."""


class TextTooLongError(RequestError):
    """A text of more than ``most`` tokens; ``count`` were found before the rest was tokenized."""

    def __init__(self, count: int, most: int) -> None:
        super().__init__(f"the text has {count} tokens or more, and the maximum is {most}; shorten it")
        self.count, self.most = count, most


class CapacityError(RunnerError):
    """A cache, or a model with its cache, that is larger than the available memory."""


def check_whole(owner: str, name: str, value: object, least: int, note: str = "") -> int:
    """An option as an int; RequestError unless it is a whole number >= ``least``. ``note`` ends the
    message.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise RequestError(f"{owner}: {name}={value!r}; it must be a whole number of at least {least}{note}")
    return int(value)
