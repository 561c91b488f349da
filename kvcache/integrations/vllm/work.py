"""A small thread pool."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable

__all__ = ["Workers"]

log = logging.getLogger("kvcache")


class Workers:
    """``count`` threads, started with the first job. A process may end while a store hangs in one."""

    def __init__(self, name: str, count: int) -> None:
        self._name, self._count = name, count
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._given_up = False

    def submit(self, job: Callable[[], None]) -> None:
        if len(self._threads) < self._count:
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()
        self._jobs.put(job)

    def close(self, timeout: float = math.inf) -> bool:
        """Finish the submitted jobs and end the threads. False if some did not finish within ``timeout``; a
        further call does not wait again.
        """
        until = time.monotonic() + (0.0 if self._given_up else timeout)
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(0.0, min(until - time.monotonic(), threading.TIMEOUT_MAX)))
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._given_up = bool(self._threads)
        return not self._threads

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                log.exception("%s: a job failed", self._name)
