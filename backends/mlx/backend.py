"""Backend and Context on MLX: one stream, and the rule for when lazy work is handed to it."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np

from backends.mlx import fused
from backends.mlx.arrays import BITS, MLX_DTYPES, from_host, from_mlx_dtype, scalar, schedule, to_host
from backends.mlx.distributed import MlxGroup, join
from backends.mlx.errors import MLX_ERRORS, device_errors
from backends.mlx.storage import SIZE_LIMIT, WAIT_BYTES, Box
from backends.mlx.store import MlxKVStore
from backends.mlx.tensor import MlxTensor
from backends.placement import only_device
from ml.base import BaseBackend, BaseContext, BaseGroup, BaseTensor
from ml.capabilities import CacheConfig, CausalMask, Layout
from ml.devices import DeviceInfo, DeviceMemory
from ml.dtypes import DType
from ml.errors import DeviceError, DTypeError, GroupError
from ml.host import host_memory
from ml.nn.rope import RopeSpec
from ml.protocols import Tensor
from ml.strided import Shape, contiguous_strides, overlaps_itself

__all__ = ["MlxBackend", "MlxContext"]

PENDING_RESULTS = 512
"""Results and writes that may wait unscheduled; one more hands them all to the stream."""
PENDING_BYTES = 64 << 20
"""Bytes that waiting writes may carry: their sources stay in memory until they are done."""
_ALONE = contextlib.nullcontext()


class MlxBackend(BaseBackend):
    """``open_backend("mlx", device=None, dtype=DType.F32)``; device "gpu" or "cpu", None: the best there is.

    ``devices=["gpu"], layers=32`` says the same; several devices are refused.

    **One stream.** Everything runs in order on a stream that any thread may use (MLX's default
    streams belong to one thread each, and work begun on them cannot be finished elsewhere).
    Neither the default device nor a default stream is touched. ``lock`` guards what MLX leaves to
    its users: the replacement of a box's array, and evaluation.

    **When work happens.** Operations build a graph. Live results and written boxes are noted
    weakly, and ``flush`` hands all of them to the stream without waiting: at ``compute``,
    ``to_numpy`` and ``native``, and by itself after PENDING_RESULTS of them or PENDING_BYTES of
    written data, so that no graph grows without bound, whether or not anyone calls ``compute``.

    **Epochs.** ``epoch`` counts flushes, and ``drained`` is the last epoch whose work has all run:
    what was last touched by then may be written without MLX seeing anything in flight.
    """

    def __init__(
        self,
        device: str | None = None,
        dtype: DType = DType.F32,
        devices: Sequence[str] | None = None,
        layers: int | None = None,
    ) -> None:
        target = _device(only_device("mlx", device, devices, layers))
        super().__init__("mlx", (_device_info(target),), dtype)
        self.stream, self.lock = _stream(target.type == mx.gpu)
        self.on_stream: Any = mx.stream(self.stream)
        """To be entered under the lock, and not inside itself; made once, since making it costs as much."""
        self.widens = target.type == mx.cpu
        """Compute F16 and BF16 in F32: MLX's kernels do so themselves on a GPU, but not on the CPU."""
        self.fused_rope = target.type == mx.gpu
        """On the CPU mx.fast.rope is slower than the generic body, whose tables serve all layers."""
        self.boxes: dict[int, weakref.ref[Box]] = {}
        self.epoch, self.drained = 1, 0
        self._pending: list[weakref.ref[Box]] = []
        self._pending_bytes = 0
        self._limit = _total_memory(self.devices[0].kind) or sys.maxsize
        self.group: BaseGroup | None = None

    def _new_context(self, max_graph_nodes: int) -> MlxContext:
        return MlxContext(self, max_graph_nodes)

    # When work happens.

    def new_box(self, array: Any, raw: bool = True) -> Box:
        """A storage around a pending result; DeviceError where no memory of this machine could hold it."""
        if array.nbytes > self._limit or array.size > SIZE_LIMIT:
            # The system may promise memory that it has not, and end the process when it is touched.
            raise DeviceError(
                f"allocate: {array.nbytes} bytes for {array.shape} of {array.dtype}; "
                f"the device has {self._limit}, and MLX counts up to {SIZE_LIMIT} elements"
            )
        box = Box(self, array, raw)
        self.defer(box)
        return box

    def defer(self, box: Box, nbytes: int = 0) -> None:
        """Note a result or a write that is not evaluated yet."""
        self._pending.append(weakref.ref(box))
        self._pending_bytes += nbytes
        if len(self._pending) > PENDING_RESULTS or self._pending_bytes > PENDING_BYTES:
            self.flush()

    def defer_pair(self, first: weakref.ref[Box], second: weakref.ref[Box], nbytes: int) -> None:
        """Note two writes at once."""
        pending = self._pending
        pending += (first, second)
        self._pending_bytes += nbytes
        if len(pending) > PENDING_RESULTS or self._pending_bytes > PENDING_BYTES:
            self.flush()

    def flush(self, *arrays: Any) -> int:
        """Hand every pending result, and ``arrays`` after them, to the stream; returns the epoch that ends.

        Does not wait: the stream runs in order, so that whoever waits for the last has them all.
        """
        with self.lock:
            pending, self._pending, self._pending_bytes = self._pending, [], 0
            self.epoch += 1
            boxes = dict.fromkeys([ref() for ref in pending])  # each once, in order
            try:
                with self.waiting("compute"):
                    schedule([box.array for box in boxes if box is not None], *arrays)
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
            if isinstance(self.group, MlxGroup):  # NumPy's way to the array is not told that a rank has ended
                with self.waiting("to_numpy"):
                    mx.eval(bits)
            host = to_host(bits, dtype)
        self.drained = max(self.drained, epoch)
        return host

    def waiting(self, op: str) -> contextlib.AbstractContextManager[None]:
        """Around what waits for the stream: other ranks may be what it waits for."""
        return self.group.waiting(op) if isinstance(self.group, MlxGroup) else _ALONE

    # Capabilities.

    def distributed(self, timeout: float = 60.0) -> BaseGroup:
        """See :class:`ml.SupportsDistributed`. MLX joins once per process, all groups are the same ranks."""
        self.check("distributed")
        if self.group is not None and not self.group.closed:
            raise GroupError(f"distributed: {self.group!r} is open on this backend; close it first")
        self.group = join(self, timeout)
        return self.group

    def kv_store(self, key: MlxTensor, value: MlxTensor) -> MlxKVStore | None:
        """See :class:`ml.SupportsKVStore`."""
        return MlxKVStore.over(self, key, value)

    def overwrite(self, ctx: Any, tensor: MlxTensor) -> np.ndarray | None:
        """See :class:`ml.SupportsHostWrite`. None on a GPU."""
        ctx.check("overwrite", tensor)
        if self.devices[0].kind != "cpu" or overlaps_itself(tensor.shape, tensor.strides):
            return None
        if not tensor.nbytes:
            return np.empty(tensor.shape, tensor.dtype.numpy)
        with device_errors("overwrite"):
            memory = tensor.storage.memory(tensor.offset)
        size = tensor.dtype.itemsize
        strides = tuple(stride * size for stride in tensor.strides)
        return np.ndarray(tensor.shape, tensor.dtype.numpy, memory, tensor.offset * size, strides)

    def cache_config(self) -> CacheConfig:
        return CacheConfig(mask_dtype=self.dtype, layout=Layout.HEAD_MAJOR, elide_mask=True)

    def attention(
        self,
        ctx: Any,
        query: Any,
        key: Any,
        value: Any,
        mask: Tensor | CausalMask | None,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Any:
        ctx.check("attention")
        return fused.attention(self, ctx, query, key, value, mask, scale, sinks)

    def rope(self, ctx: Any, x: Any, positions: Any, spec: RopeSpec) -> Any:
        ctx.check("rope")
        return fused.rope(self, x, positions, spec) if self.fused_rope else None

    # Memory.

    def _device_memory(self, index: int, device: DeviceInfo, allocated: int) -> DeviceMemory:
        if device.kind == "cpu":
            free, total = host_memory()
            return DeviceMemory(device.name, allocated, free, total)
        total = _total_memory(device.kind)
        return DeviceMemory(
            device.name, allocated, None if total is None else max(0, total - mx.get_active_memory()), total
        )

    def close(self) -> None:
        """Frees the arrays of all tensors, held or not, and MLX's cache of freed buffers."""
        with self.lock:
            if self.closed:
                return
            super().close()
            if isinstance(self.group, MlxGroup):
                whole = self.group.finish(self.stream)
            else:
                whole = True
                mx.synchronize(self.stream)
            if self.group is not None:
                self.group.close()
            for ref in list(self.boxes.values()):
                if (box := ref()) is not None:
                    box.array = None
            self._pending = []
            self.allocations.clear()
            if whole:  # a stream that waits for a rank that is lost would not let go of it
                mx.clear_cache()


class MlxContext(BaseContext):
    """Creation of tensors. ``forward`` has nothing to remember: the backend knows all that is pending."""

    backend: MlxBackend

    def _own(self, array: Any, dtype: DType) -> MlxTensor:
        """A new storage, in C order, around an array that no one else holds."""
        box = self.backend.new_box(array, raw=False)
        if box.nbytes >= WAIT_BYTES:
            self.backend.flush()  # take the memory now: its lack shows here, the first write finds it
        return MlxTensor.whole(box, dtype, box.shape)

    def _empty(self, shape: Shape, dtype: DType) -> MlxTensor:
        return self._full(shape, 0, dtype)  # MLX has no uninitialised arrays

    def _full(self, shape: Shape, value: float, dtype: DType) -> MlxTensor:
        with device_errors("allocate"):
            fill = from_host(scalar(value, dtype))
            array = mx.full(shape, fill, MLX_DTYPES[dtype], stream=self.backend.stream)
        return self._own(array, dtype)

    def _from_array(self, array: np.ndarray, dtype: DType) -> MlxTensor:
        with device_errors("from_numpy"):
            return self._own(from_host(array), dtype)

    def _from_native(self, array: Any) -> MlxTensor:
        """The array of the moment: MLX's ``x[...] = y`` gives the Python object another array,
        which this tensor does not see; nor does a write through the tensor change ``array``."""
        if not isinstance(array, mx.array):
            raise DTypeError(f"from_native: {type(array).__name__} is no mlx.core.array; use from_numpy")
        dtype = from_mlx_dtype("from_native", array.dtype)
        if array.size > SIZE_LIMIT:
            raise DeviceError(f"from_native: {array.size} elements; views of them need at most {SIZE_LIMIT}")
        with self.backend.lock, device_errors("from_native"):
            schedule(array)  # here: pending work of another stream may be bound to this thread
            box = Box(self.backend, array.__copy__(), owned=False)
        return MlxTensor(box, dtype, 0, box.shape, contiguous_strides(box.shape))

    def _compute(self, tensors: tuple[BaseTensor, ...]) -> None:
        """Hand everything that is pending to the stream. Waiting is left to whoever reads the result."""
        self.backend.flush(*(tensor.storage.array for tensor in tensors if isinstance(tensor, MlxTensor)))


@functools.lru_cache(maxsize=2)
def _stream(gpu: bool) -> tuple[Any, Any]:
    """The device's stream and its lock, shared by all instances: MLX keeps a thread per stream for good."""
    make = getattr(mx, "new_thread_unsafe_stream", mx.new_stream)
    return make(mx.Device(mx.gpu if gpu else mx.cpu, 0)), threading.RLock()


def _device(name: str | None) -> Any:
    if name is None:
        name = "gpu" if mx.is_available(mx.gpu) else "cpu"
    if name == "cpu":
        return mx.Device(mx.cpu, 0)
    if name == "gpu" and mx.is_available(mx.gpu):
        return mx.Device(mx.gpu, 0)
    there = "'gpu' and 'cpu'" if mx.is_available(mx.gpu) else "'cpu' only"
    raise DeviceError(f"open_backend: mlx has no device {name!r} here; there is {there}")


def _device_info(device: Any) -> DeviceInfo:
    kind = "cpu" if device.type == mx.cpu else "gpu"
    described = mx.device_info(device).get("device_name", "")
    return DeviceInfo(kind, kind, f"MLX {version('mlx')} {described}".rstrip())


def _total_memory(kind: str) -> int | None:
    if kind == "cpu":
        return host_memory()[1]
    info = mx.device_info(mx.gpu)
    size = info.get("memory_size", info.get("total_memory"))
    return None if size is None else int(size)
