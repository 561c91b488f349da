"""Copying what leaves a device to host memory by a thread, while the caller goes on.

What is to leave is copied within the device first, where it still lies in the cache: its cells and slots are
free at once. The way to host memory, which is long for a device with memory of its own, is the device's where
the backend has ``SupportsTransfers`` (the thread only waits for it), else the thread's.
At most ``limit`` bytes are under way; who sends more waits.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator
from typing import cast

import ml
from kvcache.snapshots.serialize import begin_serialize, serialize, serialized_nbytes
from kvcache.snapshots.snapshot import (
    AttentionSnapshot,
    EncoderSnapshot,
    Snapshot,
    StateSnapshot,
    WrapperSnapshot,
    tensors_of,
)
from kvcache.stores.serialized_snapshot import SerializedSnapshot

__all__ = ["OffloadJob", "OffloadWorker"]

log = logging.getLogger("kvcache")


class OffloadJob:
    """A snapshot under way. When it is there, ``serialized`` is; when that failed, ``error`` is."""

    __slots__ = ("begun", "error", "nbytes", "owner", "serialized", "serialized_nbytes", "snapshot")

    def __init__(self, snapshot: Snapshot, owner: object) -> None:
        self.snapshot: Snapshot | None = snapshot
        """Copies of its own on the device, until the serialized snapshot is there."""
        self.owner = owner
        self.nbytes = snapshot.nbytes
        self.serialized_nbytes = serialized_nbytes(snapshot)
        self.serialized: SerializedSnapshot | None = None
        self.error: BaseException | None = None
        self.begun: tuple[SerializedSnapshot, ml.PageTransfer] | None = None
        """What the device is writing; None where the thread has it all to do."""

    def content(self) -> Snapshot | SerializedSnapshot:
        """Where its content is now; while it is under way, on the device."""
        snapshot = self.snapshot  # first: the serialized snapshot is there before the snapshot goes
        if snapshot is not None:
            return snapshot
        assert self.serialized is not None
        return self.serialized


def wait_for(backend: ml.Backend, snapshot: Snapshot) -> None:
    """Wait until a detached snapshot's copies are made.

    A device may work in streams, one current in each thread, and orders nothing between them: another
    thread would read what this one's stream has not written yet. Reading an element waits for the stream.
    """
    with backend.new_context() as ctx:
        for tensor in _tensors(snapshot):
            if all(tensor.shape):
                tensor.view(ctx, 0, (1,)).to_numpy()


def _tensors(snapshot: Snapshot) -> Iterator[ml.Tensor]:
    """All that a detached snapshot holds."""
    if isinstance(snapshot, WrapperSnapshot):
        for part in snapshot.parts:
            yield from _tensors(part)
    elif isinstance(snapshot, StateSnapshot):
        yield from snapshot.states.values()
    elif isinstance(snapshot, AttentionSnapshot):
        yield from tensors_of(snapshot.layers)
    elif isinstance(snapshot, EncoderSnapshot):
        yield from (tensor for pair in snapshot.layers.values() for tensor in pair)


class OffloadWorker:
    """The way from ``backend`` to host memory, one snapshot after another."""

    def __init__(self, backend: ml.Backend, limit: int) -> None:
        self.limit = limit
        self.waiting = 0
        """Bytes under way."""
        self._backend = backend
        pages = isinstance(backend, ml.SupportsTransfers) and backend.pinned_memory(0) is not None
        self._pages = cast("ml.SupportsTransfers", backend) if pages else None
        self._far = any(device.kind != "cpu" for device in backend.devices)
        self._sent: deque[OffloadJob] = deque()
        self._finished: deque[OffloadJob] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def send(self, snapshot: Snapshot, owner: object) -> OffloadJob:
        """Let a snapshot go on its way; waits while too much is (one always fits).

        It is detached first: what the device refuses then is raised, and nothing is under way.
        """
        snapshot.detach()
        job = OffloadJob(snapshot, owner)
        with self._changed:
            self._changed.wait_for(lambda: not self.waiting or self.waiting + job.nbytes <= self.limit)
        job.begun = self._begin(snapshot)
        with self._changed:
            self.waiting += job.nbytes
            self._sent.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="kvcache-offload", daemon=True)
                try:
                    self._thread.start()
                except BaseException:
                    self._thread = None
                    self.waiting -= job.nbytes
                    self._sent.remove(job)
                    raise
        return job

    def _begin(self, snapshot: Snapshot) -> tuple[SerializedSnapshot, ml.PageTransfer] | None:
        """Have the device copy by itself, if it does; else see to it that another thread may."""
        if self._pages is not None:
            try:
                if (begun := begin_serialize(self._pages, snapshot)) is not None:
                    return begun
            except ml.DeviceError as error:
                log.warning("offload: %s; the thread copies through memory that is not page-locked", error)
        if self._far:
            wait_for(self._backend, snapshot)
        return None

    def finished(self) -> Iterator[OffloadJob]:
        """What has arrived, or failed, since the last call."""
        while self._finished:
            yield self._finished.popleft()

    def drain(self) -> None:
        """Wait until nothing is under way. There is no thread then."""
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None)

    def _work(self) -> None:
        """Carry over what was sent, and end when there is no more: nothing has to be closed."""
        while (job := self._next()) is not None:
            try:
                assert job.snapshot is not None
                if job.begun is None:
                    job.serialized = serialize(self._backend, job.snapshot)
                else:
                    job.begun[1].wait()
                    job.serialized = job.begun[0]
                job.snapshot = job.begun = None
            except BaseException as error:  # counted by who sent it, whatever it is
                job.error = error
                log.exception("offload: %d bytes did not leave the device", job.nbytes)
            self._finished.append(job)
            with self._changed:
                self.waiting -= job.nbytes
                self._changed.notify_all()

    def _next(self) -> OffloadJob | None:
        with self._changed:
            if self._sent:
                return self._sent.popleft()
            self._thread = None
            self._changed.notify_all()
            return None
