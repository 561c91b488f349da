"""A strict backend (see ``ml.testing.strict``) that fails when told to.

Since every call passes through a ``Plan``, any one of them can be made to raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml
from ml.testing.strict import strict


class InjectedError(ml.DeviceError):
    """What a planned failure raises."""


class Plan:
    """The names of the calls made, and which of them fails.

    ``fail_at`` counts from the call after ``arm``; ``after`` lets the call do its work first, as a
    device does whose error comes late.
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
    """``backend`` with the required protocol and nothing else; its calls go by the plan."""
    return strict(backend, (plan or Plan()).run)
