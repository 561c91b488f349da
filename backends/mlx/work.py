"""The work of a device's stream: what is pending, what runs, what is done, and when it is handed over."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from backends.mlx.arrays import BITS, schedule, to_host
from backends.mlx.errors import MLX_ERRORS, device_errors
from ml.base import Storage
from ml.dtypes import DType
from ml.errors import DeviceError, GroupError

PENDING_RESULTS = 512
"""Results and writes that may wait unscheduled; one more hands them all to the stream."""
PENDING_BYTES = 64 << 20
"""Bytes that waiting writes may carry: their sources stay in memory until they are done."""
_ALONE = contextlib.nullcontext()


class Ranks(Protocol):
    """Other processes that work in the stream may wait for."""

    def waiting(self, op: str) -> contextlib.AbstractContextManager[None]:
        """Around what waits for the stream, for no longer than the group's limit."""


class MlxWork:
    """The work of one backend.

    **One stream.** Everything runs in order on a stream that any thread may use (MLX's default
    streams belong to one thread each, and work begun on them cannot be finished elsewhere).
    Neither the default device nor a default stream is touched. ``lock`` guards what MLX leaves to
    its users: the replacement of a storage's array, and evaluation.

    **When work happens.** Operations build a graph. Live results and written storages are noted
    weakly, and ``flush`` hands all of them to the stream without waiting: at ``compute``,
    ``to_numpy`` and ``native``, and by itself after PENDING_RESULTS of them or PENDING_BYTES of
    written data, so that no graph grows without bound, whether or not anyone calls ``compute``.

    **Epochs.** ``epoch`` counts flushes, and ``drained`` is the last epoch whose work has all run:
    what was last touched by then may be written without MLX seeing anything in flight. A write to what
    was touched later is noted with ``hold``: the flush that hands it over waits first, and whoever
    builds the graph does not, so that a pass is built while the one before runs.

    ``limit``: bytes of the device's memory.
    """

    def __init__(self, gpu: bool, limit: int) -> None:
        self.stream, self.lock = _stream(gpu)
        self.on_stream: Any = mx.stream(self.stream)
        """To be entered under the lock, and not inside itself; made once, since making it costs as much."""
        self.widens = not gpu
        """Compute F16 and BF16 in F32: MLX's kernels do so themselves on a GPU, but not on the CPU."""
        self.limit = limit
        self.storages: dict[int, weakref.ref[Storage]] = {}
        """By ``id``, all that live."""
        self.epoch, self.drained = 1, 0
        self._held = 0
        """The epoch that the next flush waits for."""
        self.ranks: Ranks | None = None
        self._pending: list[weakref.ref[Storage]] = []
        self._pending_bytes = 0

    @property
    def pending(self) -> int:
        """Results and writes that wait to be handed over."""
        return len(self._pending)

    def defer(self, storage: Storage, nbytes: int = 0) -> None:
        """Note a result or a write that is not evaluated yet."""
        self._pending.append(weakref.ref(storage))
        self._pending_bytes += nbytes
        if len(self._pending) > PENDING_RESULTS or self._pending_bytes > PENDING_BYTES:
            self.flush()

    def defer_pair(self, first: weakref.ref[Storage], second: weakref.ref[Storage], nbytes: int) -> None:
        """Note two writes at once."""
        pending = self._pending
        pending += (first, second)
        self._pending_bytes += nbytes
        if len(pending) > PENDING_RESULTS or self._pending_bytes > PENDING_BYTES:
            self.flush()

    def flush(self, *arrays: Any) -> int:
        """Hand every pending result, and ``arrays`` after them, to the stream; returns the epoch that ends.

        Does not wait for them: the stream runs in order, so that whoever waits for the last has them all.
        """
        with self.lock:
            if self._held > self.drained:
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
        """Let writes that follow be handed over when the work of ``epoch`` and before has all run.

        What is pending of it is handed over now, with ``arrays``.
        """
        if epoch <= self.drained:
            return
        if epoch == self.epoch:
            self.flush(*arrays)
        self._held = max(self._held, epoch)

    def _wait(self) -> None:
        """Return when all that was handed over has run."""
        last = self.epoch - 1
        with self.waiting("compute"):
            mx.synchronize(self.stream)
        self.drained = max(self.drained, last)

    def fetch(self, array: Any, dtype: DType) -> np.ndarray:
        """A host copy of an array, computed now."""
        # A node of its own, last in this flush, even where the array was computed long ago: waiting
        # for it is waiting for the stream. As bits, since NumPy cannot read MLX's bfloat16.
        bits = mx.view(array, BITS[dtype], stream=self.stream)
        epoch = 0
        try:
            epoch = self.flush(bits)
        except DeviceError:  # of another result, maybe: then this one still has its value
            with self.lock, device_errors("to_numpy"):
                schedule(bits)
        with device_errors("to_numpy"):
            if self.ranks is not None:  # NumPy's way to the array is not told that a rank has ended
                with self.waiting("to_numpy"):
                    mx.eval(bits)
            host = to_host(bits, dtype)
        self.drained = max(self.drained, epoch)
        return host

    def waiting(self, op: str) -> contextlib.AbstractContextManager[None]:
        """Around what waits for the stream: other ranks may be what it waits for."""
        return _ALONE if self.ranks is None else self.ranks.waiting(op)

    def discard(self) -> None:
        """Let go of what is pending and of the arrays of all storages."""
        for ref in list(self.storages.values()):
            if (storage := ref()) is not None:
                storage.array = None
        self._pending = []


@functools.lru_cache(maxsize=2)
def _stream(gpu: bool) -> tuple[Any, Any]:
    """The device's stream and its lock, shared by all instances: MLX keeps a thread per stream for good."""
    make = getattr(mx, "new_thread_unsafe_stream", mx.new_stream)
    return make(mx.Device(mx.gpu if gpu else mx.cpu, 0)), threading.RLock()
