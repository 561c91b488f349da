"""NumPy as a device that pages by itself: its copies finish late, in any order, and what touches them shows.

Memory that a page is on its way to is spoilt until it is there, and memory that is read or written under a
copy is found out: in ``broken``, which a test looks at last. An error of a copy comes as late as it may.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

import ml
from backends.numpy.backend import NumpyBackend

THREADS = 4


class LateTransfer:
    def __init__(self, device: LateBackend, copies: Future[None]) -> None:
        self._device, self._copies = device, copies

    def done(self) -> bool:
        return self._copies.done()

    def wait(self) -> None:
        self._copies.result(60)

    def join(self) -> None:
        """NumPy has no order to wait in but the host's own."""
        self._device.joined(self)
        self.wait()


class LateBackend(NumpyBackend):
    """``gate``: nothing is copied while it is shut. ``failing``: how many copies to come fail."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.failing = 0
        self.locked: int | None = None
        """Bytes of page-locked memory that are left; None: any number."""
        self.broken: list[str] = []
        self.targets: list[np.ndarray] = []
        """What pages were written to."""
        self.transfers: list[LateTransfer] = []
        self.joined: Callable[[LateTransfer], None] = lambda transfer: None
        self._random = random.Random(seed)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="late-device")

    def overwrite(self, ctx: Any, tensor: Any) -> None:
        """The host cannot write there."""
        ctx.check("overwrite", tensor)

    def upload(self, ctx: Any, arrays: Sequence[tuple[np.ndarray, ml.DType]]) -> list[Any]:
        return [ctx.from_numpy(array, dtype) for array, dtype in arrays]

    def pinned_memory(self, nbytes: int) -> np.ndarray:
        if self.locked is not None:
            if nbytes > self.locked:
                raise ml.DeviceError(f"pinned_memory: {nbytes} bytes; {self.locked} are left")
            self.locked -= nbytes
        return np.empty(nbytes, np.uint8)

    def page_out(self, ctx: Any, tensors: Sequence[Any]) -> tuple[list[np.ndarray], LateTransfer]:
        ctx.check("page_out")
        self.pinned_memory(sum(tensor.nbytes for tensor in tensors))
        sources = [tensor.native for tensor in tensors]
        arrays = [np.empty(source.shape, source.dtype) for source in sources]
        return arrays, self._begin("page_out", sources, arrays)

    def page_in(self, ctx: Any, arrays: Sequence[np.ndarray], tensors: Sequence[Any]) -> LateTransfer:
        ctx.check("page_in")
        targets = [tensor.native for tensor in tensors]
        self.targets += targets
        return self._begin("page_in", [*arrays], targets)

    def _begin(self, op: str, sources: list[np.ndarray], targets: list[np.ndarray]) -> LateTransfer:
        began = [source.tobytes() for source in sources]
        for target in targets:
            _bits(target)[...] = np.iinfo(_bits(target).dtype).max  # NaN, of a float
        spoilt = [target.tobytes() for target in targets]
        fails, self.failing = self.failing > 0, max(0, self.failing - 1)
        seconds = self._random.choice((0, 0, 0.0005, 0.002))

        def copy() -> None:
            assert self.gate.wait(60)
            time.sleep(seconds)
            if [source.tobytes() for source in sources] != began:
                self.broken.append(f"{op}: what it reads was written before it was done")
            if [target.tobytes() for target in targets] != spoilt:
                self.broken.append(f"{op}: what it writes was written before it was done")
            for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
                if fails and i == len(sources) // 2:
                    raise ml.DeviceError(f"{op}: told to fail")
                _bits(target)[...] = _bits(source)

        self.transfers.append(LateTransfer(self, self._pool.submit(copy)))
        return self.transfers[-1]

    def close(self) -> None:
        if not self.closed:
            self.gate.set()
            self._pool.shutdown()
            super().close()


def _bits(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.dtype.itemsize}")
