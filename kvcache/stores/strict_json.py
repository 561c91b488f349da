"""JSON without its loose ends: keys must be strings, each given once, numbers are finite, text is Unicode.

It is nested no deeper than ``DEEPEST``, on every version of Python: the newer ones parse as deep as the
stack reaches, and whoever looks at the value then does not.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

__all__ = ["DEEPEST", "decode", "encode"]

DEEPEST = 100
_ESCAPED = re.compile(r"\\.", re.DOTALL)


def encode(value: object, *, canonical: bool = False) -> str:
    """JSON text of ``value``; ``canonical``: keys sorted, ASCII only, so that equal values give equal text.

    Raises ValueError for what JSON cannot say: keys that are no strings, NaN, infinities, lone
    surrogates, other types, cycles; and for what is nested too deep.
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


def decode(data: bytes | str) -> Any:
    """The value of strict JSON text. Raises ValueError for anything else."""
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        _check_depth(text)
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique)
        if "\\u" in text:  # the only way to a lone surrogate
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not strict JSON: {error}") from error
    return value


def _check_depth(text: str) -> None:
    if text.count("[") + text.count("{") <= DEEPEST:
        return
    outside = "".join(_ESCAPED.sub("", text).split('"')[::2])
    found = np.frombuffer(outside.encode("utf-8", "replace"), np.uint8)
    opened = np.isin(found, (ord("["), ord("{"))).astype(np.int64)
    depth = int((opened - np.isin(found, (ord("]"), ord("}")))).cumsum().max(initial=0))
    if depth > DEEPEST:
        raise ValueError(f"it is nested {depth} deep; {DEEPEST} is the limit")


def _check_keys(value: object) -> None:
    """JSON would quietly turn the key 1 into "1"."""
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


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is given twice")
    return found
