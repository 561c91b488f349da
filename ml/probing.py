"""Asking plugins whether they can run here: each once, in a thread of its own, within a time limit."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from ml.backend_spec import Availability
from ml.errors import ShapeError
from ml.records import shown, summary

LIMIT_S = 60.0
"""A framework on a slow disk takes ten seconds and more to import; a driver that hangs never ends."""
LIMIT_VARIABLE = "ML_PROBE_TIMEOUT"


class Probe:
    """One record's probe. It is run when it is first asked for, and its answer stays."""

    def __init__(self, probe: Callable[[], Availability]) -> None:
        self._probe = probe
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._until = self._limit = 0.0
        self._answer: Availability | None = None
        self._raised: BaseException | None = None

    def answer(self) -> Availability:
        """What it found; unavailable for that reason where it raises, or has not ended within the limit.

        One that ends later has its answer from then on.
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
        """Whether it has been run and has not ended."""
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
        except BaseException as error:  # for whoever asks: an interrupt is no answer
            self._raised = error
        else:
            if isinstance(answer, Availability):
                self._answer = answer
            else:
                reason = f"its probe gave {shown(answer)}; it must return an ml.Availability"
                self._answer = Availability(False, reason)


def _limit() -> float:
    """Seconds; ShapeError where the variable says something else."""
    text = os.environ.get(LIMIT_VARIABLE, "") or str(LIMIT_S)
    try:
        asked = float(text)
    except ValueError:
        asked = 0.0
    if not 0 < asked < threading.TIMEOUT_MAX:
        raise ShapeError(f"{LIMIT_VARIABLE}={text!r}; it must be a number of seconds above 0")
    return asked
