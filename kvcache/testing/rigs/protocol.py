"""A strict backend (see ``ml.testing.strict``) with planned failures. Every call passes through a ``Plan``,
which can make it raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml
from ml.testing.strict import strict


class InjectedError(ml.DeviceError):
    """The error of a planned failure."""


class Plan:
    """The names of the calls made, and which of them fails.

    ``fail_at`` counts from the call after ``arm``; ``after`` runs the call first, like a device that reports
    its error late.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._fail_at: int | None = None
        self._after = False
        self._error: type[BaseException] = InjectedError

    def arm(
        self, fail_at: int | None, after: bool = False, error: type[BaseException] = InjectedError
    ) -> None:
        self.calls.clear()
        self._fail_at, self._after, self._error = fail_at, after, error

    def run(self, name: str, call: Callable[[], Any]) -> Any:
        fails = len(self.calls) == self._fail_at
        self.calls.append(name)
        if fails and not self._after:
            raise self._error(f"{name}: injected before it ran")
        result = call()
        if fails:
            raise self._error(f"{name}: injected after it ran")
        return result


def only_protocol(backend: ml.Backend, plan: Plan | None = None) -> ml.Backend:
    """``backend`` with the required protocol only; its calls follow ``plan``."""
    return strict(backend, (plan or Plan()).run)
