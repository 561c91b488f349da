"""Copies of pages on separate streams: shared by CUDA's frameworks.

::

    compute stream   ... writes cells | e1            | waits e2 | reads cells ...
    copy stream                         waits e1, copies | e2

The host does not wait; the compute stream waits for ``e2`` only before the data is used (``join``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

RUN = 256 << 10
"""Bytes; shorter runs are first gathered in a contiguous tensor, since each call has a cost."""


class CopyQueue(Protocol):
    """One device's stream for copies in one direction. Its methods raise ml errors."""

    def after_compute(self, op: str) -> AbstractContextManager[None]:
        """Run calls inside on the stream, ordered after all work of this thread's current stream."""

    def mark(self) -> Any:
        """An event after all work submitted to the stream."""

    def reached(self, event: Any) -> bool: ...
    def wait(self, event: Any) -> None:
        """Make the host wait for an event."""

    def join(self, event: Any) -> None:
        """Make this thread's current stream of the device wait for an event."""


class StreamTransfer:
    """See ``ml.PageTransfer``."""

    def __init__(self, marks: Sequence[tuple[CopyQueue, Any]], kept: object) -> None:
        self._marks = marks
        self._kept = kept
        """The memory being read and written, kept until the transfer is done."""

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
    """The pending copies of one backend, on a queue per device and direction."""

    def __init__(self, queue: Callable[[Any], CopyQueue]) -> None:
        """``queue(device)`` creates a queue."""
        self._make = queue
        self._queues: dict[tuple[str, Hashable], CopyQueue] = {}
        self._under_way: list[StreamTransfer] = []
        self._lock = threading.Lock()

    def begin(
        self, op: str, copies: Iterable[tuple[Hashable, Callable[[], None]]], kept: object
    ) -> StreamTransfer:
        """Run copies, each with its device, on the queues of ``op``; ``kept`` is kept alive until they are
        done.
        """
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
                    finally:  # copies begun before an error continue
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
        """Wait for all pending copies."""
        with self._lock:
            waiting, self._under_way = self._under_way, []
        for transfer in waiting:
            transfer.wait()


def runs(shape: Sequence[int], strides: Sequence[int], itemsize: int, least: int = RUN) -> int | None:
    """The number of outer axes whose elements are each one run in memory; None if runs are shorter than
    ``least`` bytes. An array that is a single run is never too short.
    """
    size, outer = 1, len(shape)
    while outer and (shape[outer - 1] == 1 or strides[outer - 1] == size):
        outer -= 1
        size *= shape[outer]
    return outer if size * itemsize >= least or not outer else None
