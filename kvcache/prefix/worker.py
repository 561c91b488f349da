"""Copying snapshots from the device to host memory in a thread, while the caller continues.

A snapshot that still lies in the cache is first copied within the device, so that its cells and slots are
free immediately. The transfer to host memory, which is slow for a device with its own memory, is made by the
device if the backend has ``SupportsTransfers`` (the thread only waits for it), otherwise by the thread. At
most ``limit`` bytes are in transit; sending more blocks. Backends in host memory need neither the first copy
nor the thread: the caller copies once.
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
from ml.transfer import in_host_memory

__all__ = ["OffloadJob", "OffloadWorker"]

log = logging.getLogger("kvcache")


class OffloadJob:
    """A snapshot in transit. On arrival ``serialized`` is set; on failure ``error``."""

    __slots__ = ("begun", "error", "nbytes", "owner", "serialized", "serialized_nbytes", "snapshot")

    def __init__(self, snapshot: Snapshot, owner: object) -> None:
        self.snapshot: Snapshot | None = snapshot
        """The snapshot, detached, until the serialized snapshot has arrived."""
        self.owner = owner
        self.nbytes = snapshot.nbytes
        self.serialized_nbytes = serialized_nbytes(snapshot)
        self.serialized: SerializedSnapshot | None = None
        self.error: BaseException | None = None
        self.begun: tuple[SerializedSnapshot, ml.PageTransfer] | None = None
        """The transfer made by the device; None if the thread does everything."""

    def content(self) -> Snapshot | SerializedSnapshot:
        """Its current content, which is on the device while in transit."""
        snapshot = self.snapshot  # first, so that one of the two is always set
        if snapshot is not None:
            return snapshot
        assert self.serialized is not None
        return self.serialized


def wait_for(backend: ml.Backend, snapshot: Snapshot) -> None:
    """Wait until the copies of a detached snapshot have been made.

    A device may have one current stream per thread, without ordering between streams: another thread could
    read what this thread's stream has not written yet. Reading an element waits for the stream.
    """
    with backend.new_context() as ctx:
        for tensor in _tensors(snapshot):
            if all(tensor.shape):
                tensor.view(ctx, 0, (1,)).to_numpy()


def _tensors(snapshot: Snapshot) -> Iterator[ml.Tensor]:
    """All tensors of a detached snapshot."""
    if isinstance(snapshot, WrapperSnapshot):
        for part in snapshot.parts:
            yield from _tensors(part)
    elif isinstance(snapshot, StateSnapshot):
        yield from snapshot.states.values()
    elif isinstance(snapshot, AttentionSnapshot):
        yield from tensors_of(snapshot.layers)
    elif isinstance(snapshot, EncoderSnapshot):
        yield from (tensor for pair in snapshot.layers.values() for tensor in pair)


def log_lost(error: BaseException, nbytes: int) -> None:
    """Log that content was not copied from the device; with a traceback, unless the backend is closed."""
    if isinstance(error, ml.ClosedError):
        log.error(
            "offload: %d bytes are lost, as the backend was closed before they were copied; close the "
            "PrefixCache first, then the cache, then the backend",
            nbytes,
        )
    else:
        log.error("offload: %d bytes did not leave the device", nbytes, exc_info=error)


class OffloadWorker:
    """Transfers snapshots from ``backend`` to host memory, one after another."""

    def __init__(self, backend: ml.Backend, limit: int) -> None:
        self.limit = limit
        self.waiting = 0
        """Bytes in transit."""
        self._backend = backend
        pages = isinstance(backend, ml.SupportsTransfers) and backend.pinned_memory(0) is not None
        self._pages = cast("ml.SupportsTransfers", backend) if pages else None
        self._far = any(device.kind != "cpu" for device in backend.devices)
        self._near = not pages and in_host_memory(backend)
        self._sent: deque[OffloadJob] = deque()
        self._finished: deque[OffloadJob] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def send(self, snapshot: Snapshot, owner: object) -> OffloadJob:
        """Send a snapshot; blocks while too many bytes are in transit (one snapshot always fits).

        It is detached first; if the device refuses that, the error is raised and nothing is sent.
        """
        if self._near:
            job = OffloadJob(snapshot, owner)
            try:
                job.serialized = serialize(self._backend, snapshot)
            except (ml.DeviceError, MemoryError) as error:  # as in the thread
                job.error = error
                log_lost(error, job.nbytes)
            job.snapshot = None
            self._finished.append(job)
            return job
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
        """Start the device's own transfer if it supports that; otherwise make the data readable by another
        thread.
        """
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
        """The jobs that arrived or failed since the last call."""
        while self._finished:
            yield self._finished.popleft()

    def drain(self) -> None:
        """Wait until nothing is in transit; the thread has then ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None)

    def _work(self) -> None:
        """Transfer what was sent, and end when there is nothing left, so that nothing must be closed."""
        while (job := self._next()) is not None:
            try:
                assert job.snapshot is not None
                if job.begun is None:
                    job.serialized = serialize(self._backend, job.snapshot)
                else:
                    job.begun[1].wait()
                    job.serialized = job.begun[0]
                job.snapshot = job.begun = None
            except BaseException as error:  # counted by the sender, whatever the error
                job.error = error
                log_lost(error, job.nbytes)
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
