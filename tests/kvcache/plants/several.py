"""What takes the place of parts of several areas."""

from __future__ import annotations

from typing import Any


def reversed_result(f: Any, *args: Any) -> Any:
    return (found for found in [*f(*args)][::-1])


def one_more(f: Any, *args: Any) -> Any:
    return f(*args) + 1
