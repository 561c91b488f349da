"""Probing plugins: each probe runs once, in its own thread and within a time limit."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from ml.backend_spec import Availability
from ml.errors import ShapeError
from ml.records import shown, summary

LIMIT_S = 60.0
"""Importing a framework from a slow disk can take over ten seconds; a hanging driver never finishes."""
LIMIT_VARIABLE = "ML_PROBE_TIMEOUT"


class Probe:
    """The probe of one record, which runs on first use and keeps its result."""

    def __init__(self, probe: Callable[[], Availability]) -> None:
        self._probe = probe
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._until = self._limit = 0.0
        self._answer: Availability | None = None
        self._raised: BaseException | None = None

    def answer(self) -> Availability:
        """The probe's result; unavailable if it raises, or does not finish within the limit.

        If it finishes later, its result is used from then on.
        """
        with self._lock:
            if self._thread is None:
                self._start()
        assert self._thread is not None
        self._thread.join(max(0.0, self._until - time.monotonic()))
        if self._raised is not None:
            raise self._raised
        if self._answer is None:
            late = f"its probe did not finish within {self._limit:g} s"
            return Availability(False, f"{late}; {LIMIT_VARIABLE}=SECONDS allows more time")
        return self._answer

    @property
    def late(self) -> bool:
        """Whether the probe was started and has not finished."""
        return self._thread is not None and self._thread.is_alive()

    def _start(self) -> None:
        self._limit = _limit()
        self._until = time.monotonic() + self._limit
        self._thread = threading.Thread(target=self._run, name="ml-probe", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            answer: object = self._probe()
        except (Exception, SystemExit) as error:
            self._answer = Availability(False, f"its probe raised {summary(error)}")
        except BaseException as error:  # raised to the caller: an interrupt is not a result
            self._raised = error
        else:
            if isinstance(answer, Availability):
                self._answer = answer
            else:
                reason = f"its probe returned {shown(answer)}; it must return an ml.Availability"
                self._answer = Availability(False, reason)


def _limit() -> float:
    """The limit in seconds; ShapeError if the variable is invalid."""
    text = os.environ.get(LIMIT_VARIABLE, "") or str(LIMIT_S)
    try:
        asked = float(text)
    except ValueError:
        asked = 0.0
    if not 0 < asked < threading.TIMEOUT_MAX:
        raise ShapeError(f"{LIMIT_VARIABLE}={text!r}; it must be a number of seconds above 0")
    return asked
