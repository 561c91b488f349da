"""Pages on streams of their own: what CUDA's frameworks have in common.

::

    compute stream   ... writes cells | e1            | waits e2 | reads cells ...
    copy stream                         waits e1, copies | e2

The host waits for nothing; the compute stream waits for ``e2`` only where what arrives is used (``join``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

RUN = 256 << 10
"""Bytes; what lies in shorter runs goes by way of a tensor without gaps: each call takes its time."""


class CopyQueue(Protocol):
    """One device's stream for copies in one direction. Its methods raise ml errors."""

    def after_compute(self, op: str) -> AbstractContextManager[None]:
        """What is asked for inside runs on the stream, after all that this thread's current one was given."""

    def mark(self) -> Any:
        """An event behind all that the stream was given."""

    def reached(self, event: Any) -> bool: ...
    def wait(self, event: Any) -> None:
        """The host waits."""

    def join(self, event: Any) -> None:
        """This thread's current stream of the device waits."""


class StreamTransfer:
    """See ``ml.PageTransfer``."""

    def __init__(self, marks: Sequence[tuple[CopyQueue, Any]], kept: object) -> None:
        self._marks = marks
        self._kept = kept
        """What is read and written, until it is done."""

    def done(self) -> bool:
        if not all(queue.reached(event) for queue, event in self._marks):
            return False
        self._kept = None
        return True

    def wait(self) -> None:
        for queue, event in self._marks:
            queue.wait(event)
        self._kept = None

    def join(self) -> None:
        for queue, event in self._marks:
            queue.join(event)


class PageStreams:
    """The copies of one backend that are under way, on a queue per device and direction."""

    def __init__(self, queue: Callable[[Any], CopyQueue]) -> None:
        """``queue(device)`` makes one."""
        self._make = queue
        self._queues: dict[tuple[str, Hashable], CopyQueue] = {}
        self._under_way: list[StreamTransfer] = []
        self._lock = threading.Lock()

    def begin(
        self, op: str, copies: Iterable[tuple[Hashable, Callable[[], None]]], kept: object
    ) -> StreamTransfer:
        """Run copies, each with its device, on the queues of ``op``; ``kept`` lives until they are done."""
        by_device: dict[Hashable, list[Callable[[], None]]] = {}
        for device, copy in copies:
            by_device.setdefault(device, []).append(copy)
        marks: list[tuple[CopyQueue, Any]] = []
        try:
            for device, mine in by_device.items():
                queue = self._queue(op, device)
                with queue.after_compute(op):
                    try:
                        for copy in mine:
                            copy()
                    finally:  # what was begun before an error goes on
                        marks.append((queue, queue.mark()))
        finally:
            transfer = StreamTransfer(marks, kept)
            with self._lock:
                self._under_way = [one for one in self._under_way if not one.done()] + [transfer]
        return transfer

    def _queue(self, op: str, device: Hashable) -> CopyQueue:
        with self._lock:
            if (op, device) not in self._queues:
                self._queues[op, device] = self._make(device)
            return self._queues[op, device]

    def close(self) -> None:
        """Wait for all that is under way."""
        with self._lock:
            waiting, self._under_way = self._under_way, []
        for transfer in waiting:
            transfer.wait()


def runs(shape: Sequence[int], strides: Sequence[int], itemsize: int, least: int = RUN) -> int | None:
    """How many outer axes an array has whose elements lie in one run each; None where runs are short.

    ``least`` bytes are not; all of an array in one run is never short.
    """
    size, outer = 1, len(shape)
    while outer and (shape[outer - 1] == 1 or strides[outer - 1] == size):
        outer -= 1
        size *= shape[outer]
    return outer if size * itemsize >= least or not outer else None
