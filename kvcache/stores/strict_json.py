"""Strict JSON: keys are strings and unique, numbers are finite, and text is Unicode.

Nesting is limited to ``DEEPEST`` on every version of Python: newer versions parse as deep as the stack
allows, but code that walks the value may not.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np

__all__ = ["DEEPEST", "decode", "encode"]

DEEPEST = 100
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_PART = 1 << 16


def encode(value: object, *, canonical: bool = False) -> str:
    """JSON text of ``value``; ``canonical``: keys sorted, ASCII only, so that equal values give equal text.

    Raises ValueError for anything that JSON cannot express (keys that are not strings, NaN, infinities, lone
    surrogates, other types, cycles) and for values nested too deeply.
    """
    try:
        _check_keys(value)
        text = json.dumps(
            value, allow_nan=False, ensure_ascii=canonical, sort_keys=canonical, separators=(",", ":")
        )
        text.encode("utf-8")
        _check_depth(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not JSON-able: {error}") from error
    return text


def decode(data: bytes | str, most: int | None = None) -> Any:
    """The value of strict JSON text. Raises ValueError for anything else.

    ``most`` limits the number of values in foreign text, at any depth, counted by commas and brackets
    (including those in strings): each value takes many times its text in memory.
    """
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        if most is not None and sum(map(text.count, "[{,")) > most:
            raise ValueError(f"it has more than {most} values")
        _check_depth(text)
        value = json.loads(
            text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique
        )
        if "\\u" in text:  # the only way to a lone surrogate
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not strict JSON: {error}") from error
    return value


def _check_depth(text: str) -> None:
    """Checks parts of ``_PART`` characters at a time, so that memory does not grow with the text."""
    if text.count("[") + text.count("{") <= DEEPEST:
        return
    depth = deepest = 0
    quoted = escaped = False
    for start in range(0, len(text), _PART):
        part = _ESCAPED.sub("", text[start + escaped : start + _PART])
        escaped = part.endswith("\\")  # of a character in the next part
        pieces = part.split('"')
        outside = "".join(pieces[quoted::2])
        quoted ^= len(pieces) % 2 == 0
        characters = np.frombuffer(outside.encode("utf-8", "replace"), np.uint8)
        opened = np.isin(characters, (ord("["), ord("{"))).astype(np.int64)
        depths = depth + (opened - np.isin(characters, (ord("]"), ord("}")))).cumsum()
        deepest = int(depths.max(initial=deepest))
        depth = int(depths[-1]) if depths.size else depth
    if deepest > DEEPEST:
        raise ValueError(f"it is nested {deepest} deep; {DEEPEST} is the limit")


def _check_keys(value: object) -> None:
    """Refuse keys that are not strings: JSON would silently turn the key 1 into "1"."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is {type(key).__name__}; keys must be strings")
            _check_keys(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_keys(item)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"{text:.40} is beyond the numbers of JSON's readers")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a key is given twice")
    return members
