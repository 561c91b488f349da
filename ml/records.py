"""Checks of plugin records: errors name the field with the wrong type."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Set
from typing import Any, NamedTuple

from ml.errors import MLError, PluginError

__all__ = [
    "CALLABLE",
    "INTEGER",
    "NAME",
    "OPTIONAL_INTEGER",
    "OPTIONAL_TEXT",
    "TEXT",
    "TEXTS",
    "TRUTH",
    "Rule",
    "check",
    "instance",
    "members",
    "shown",
    "summary",
]

LONGEST = 80
"""How many characters of a value an error shows."""


class Rule(NamedTuple):
    """A description of a field, and ``read``, which converts its value or raises TypeError."""

    wanted: str
    read: Callable[[Any], Any]


def check(record: object, error: type[MLError] = PluginError, **rules: Rule) -> None:
    """Convert each field by its rule. Raises ``error``, naming record, field and value, if it does not
    fit.
    """
    for name, (wanted, read) in rules.items():
        value = getattr(record, name)
        try:
            object.__setattr__(record, name, read(value))  # records are frozen
        except TypeError:
            raise error(f"{type(record).__name__}: {name}={shown(value)}; it must be {wanted}") from None


def shown(value: object) -> str:
    """The shortened ``repr`` of an arbitrary value, even if its ``repr`` fails."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def summary(error: BaseException) -> str:
    """An error of a plugin in one line, even if it cannot be formatted."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def instance(wanted: str, kind: type) -> Rule:
    """A rule for values of one type."""

    def read(value: object) -> object:
        if not isinstance(value, kind):
            raise TypeError
        return value

    return Rule(wanted, read)


def members(wanted: str, kind: type, into: Callable[[Iterable[Any]], Any]) -> Rule:
    """A rule for collections of ``kind``: a tuple, list or set, converted by ``into``."""

    def read(values: object) -> object:
        if not isinstance(values, (tuple, list, Set)) or not all(isinstance(one, kind) for one in values):
            raise TypeError
        return into(values)

    return Rule(wanted, read)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return str.__str__(value)  # drops subclasses of str, such as NumPy's


def _name(value: object) -> str:
    text = _text(value)
    if not text.strip():
        raise TypeError
    return text


def _or_none(rule: Rule) -> Rule:
    return Rule(f"{rule.wanted} or None", lambda value: None if value is None else rule.read(value))


def _whole(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _called(value: object) -> object:
    if not callable(value):
        raise TypeError
    return value


NAME = Rule("a non-empty string", _name)
TEXT = Rule("a string", _text)
OPTIONAL_TEXT = _or_none(TEXT)
TEXTS = members("a tuple of strings", str, tuple)
TRUTH = instance("True or False", bool)
INTEGER = Rule("a whole number", _whole)
OPTIONAL_INTEGER = _or_none(INTEGER)
CALLABLE = Rule("a function", _called)
