"""The work of a device's stream: pending, running and finished, and when it is submitted."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from backends.mlx.arrays import BITS, schedule, to_host
from backends.mlx.errors import MLX_ERRORS, device_errors
from ml.base import Storage
from ml.dtypes import DType
from ml.errors import DeviceError, GroupError

PENDING_RESULTS = 512
"""The most unscheduled results and writes; one more submits all of them to the stream."""
PENDING_BYTES = 64 << 20
"""The most bytes of pending writes, whose sources stay in memory until they are done."""
_ALONE = contextlib.nullcontext()


class Ranks(Protocol):
    """Other processes that the stream's work may wait for."""

    def waiting(self, op: str) -> contextlib.AbstractContextManager[None]:
        """A context for waits for the stream, limited by the group's timeout."""


class MlxWork:
    """The work of one backend.

    **One stream.** Everything runs in order on a stream that any thread may use (MLX's default
    streams belong to one thread each, and work begun on them cannot be finished elsewhere).
    Neither the default device nor a default stream is touched. ``lock`` guards what MLX does not: replacing a
    storage's array, and evaluation.

    **When work happens.** Operations build a graph. Live results and written storages are recorded weakly,
    and ``flush`` submits all of them to the stream without waiting: at ``compute``, ``to_numpy`` and
    ``native``, and automatically after PENDING_RESULTS of them or PENDING_BYTES of written data, so that
    graphs stay bounded even without ``compute``.

    **Epochs.** ``epoch`` counts flushes, and ``drained`` is the last epoch whose work has all run:
    storages last used by then can be written without conflicting work in flight. A write to a storage used
    later is recorded with ``hold``: the flush that submits it waits first, but building the graph does not,
    so that a pass is built while the previous one runs.

    ``limit``: bytes of the device's memory.
    """

    def __init__(self, gpu: bool, limit: int) -> None:
        self.stream, self.lock = _stream(gpu)
        self.on_stream: Any = mx.stream(self.stream)
        """Entered under the lock, and not recursively; created once, since creation is as expensive as
        entering.
        """
        self.widens = not gpu
        """Whether to compute F16 and BF16 in F32, which MLX's kernels do on a GPU but not on the CPU."""
        self.limit = limit
        self.storages: dict[int, weakref.ref[Storage]] = {}
        """All live storages, by ``id``."""
        self.epoch, self.drained = 1, 0
        self._awaited = 0
        """The epoch that the next flush waits for."""
        self.ranks: Ranks | None = None
        self._pending: list[weakref.ref[Storage]] = []
        self._pending_bytes = 0
        self.shared_by: int | None = None
        """The thread that is in ``shared``."""

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """A context in which MLX's own functions, called by this thread, run on the stream as well. Arrays
        pass in and out unscheduled; what tensors hold of them is submitted at its end. Other threads wait
        for the stream until then: MLX does not allow that one evaluates a graph to which another adds.
        """
        with self.lock:
            if self.shared_by is not None:
                yield
                return
            self.shared_by = threading.get_ident()
            try:
                with mx.stream(self.stream):
                    yield
            finally:
                self.shared_by = None
            self.flush()

    @property
    def shared_here(self) -> bool:
        """Whether this thread is in ``shared``."""
        return threading.get_ident() == self.shared_by

    @property
    def pending(self) -> int:
        """The number of results and writes not yet submitted."""
        return len(self._pending)

    def defer(self, storage: Storage, nbytes: int = 0) -> None:
        """Record a result or a write that is not evaluated yet."""
        self._pending.append(weakref.ref(storage))
        self._pending_bytes += nbytes
        if len(self._pending) > PENDING_RESULTS or self._pending_bytes > PENDING_BYTES:
            self.flush()

    def defer_pair(self, first: weakref.ref[Storage], second: weakref.ref[Storage], nbytes: int) -> None:
        """Record two writes."""
        pending = self._pending
        pending += (first, second)
        self._pending_bytes += nbytes
        if len(pending) > PENDING_RESULTS or self._pending_bytes > PENDING_BYTES:
            self.flush()

    def flush(self, *arrays: Any) -> int:
        """Submit every pending result, then ``arrays``, to the stream; returns the epoch that ends. Does not
        wait: the stream runs in order, so waiting for the last one waits for all.
        """
        with self.lock:
            if self._awaited > self.drained:
                self._wait()
            pending, self._pending, self._pending_bytes = self._pending, [], 0
            self.epoch += 1
            storages = dict.fromkeys([ref() for ref in pending])  # each once, in order
            try:
                with self.waiting("compute"):
                    schedule([each.array for each in storages if each is not None], *arrays)
            except GroupError:
                raise
            except MLX_ERRORS as error:
                raise DeviceError(f"compute: MLX failed: {error}") from error
            return self.epoch - 1

    def drain(self, epoch: int, *arrays: Any) -> None:
        """Return when no work of ``epoch`` or before is pending or in flight; evaluates ``arrays`` too."""
        if epoch <= self.drained:
            return
        if epoch == self.epoch:
            self.flush(*arrays)
        self._wait()

    def hold(self, epoch: int, *arrays: Any) -> None:
        """Submit later writes only after all work up to ``epoch`` has run. Pending work of that epoch is
        submitted now, with ``arrays``.
        """
        if epoch <= self.drained:
            return
        if epoch == self.epoch:
            self.flush(*arrays)
        self._awaited = max(self._awaited, epoch)

    def _wait(self) -> None:
        """Return when all submitted work has run."""
        last = self.epoch - 1
        with self.waiting("compute"):
            mx.synchronize(self.stream)
        self.drained = max(self.drained, last)

    def fetch(self, array: Any, dtype: DType) -> np.ndarray:
        """A host copy of an array, computed now."""
        # A new node, last in this flush, even if the array was computed long ago: waiting for it is waiting
        # for the stream. As bits, since NumPy cannot read MLX's bfloat16.
        bits = mx.view(array, BITS[dtype], stream=self.stream)
        epoch = 0
        try:
            epoch = self.flush(bits)
        except DeviceError:  # perhaps of another result: this one may still have its value
            with self.lock, device_errors("to_numpy"):
                schedule(bits)
        with device_errors("to_numpy"):
            if self.ranks is not None:  # NumPy's access to the array does not report that a rank has ended
                with self.waiting("to_numpy"):
                    mx.eval(bits)
            host = to_host(bits, dtype)
        self.drained = max(self.drained, epoch)
        return host

    def waiting(self, op: str) -> contextlib.AbstractContextManager[None]:
        """A context for waits for the stream, which may wait for other ranks."""
        return _ALONE if self.ranks is None else self.ranks.waiting(op)

    def discard(self) -> None:
        """Drop pending work and the arrays of all storages."""
        for ref in list(self.storages.values()):
            if (storage := ref()) is not None:
                storage.array = None
        self._pending = []


@functools.lru_cache(maxsize=2)
def _stream(gpu: bool) -> tuple[Any, Any]:
    """The device's stream and its lock, shared by all instances: MLX keeps a thread per stream
    permanently.
    """
    make = getattr(mx, "new_thread_unsafe_stream", mx.new_stream)
    return make(mx.Device(mx.gpu if gpu else mx.cpu, 0)), threading.RLock()
