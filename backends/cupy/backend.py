"""Backend and Context on CuPy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np

from backends.cupy.devices import find_places
from backends.cupy.ragged import ragged_attention
from backends.cupy.tensor import CupyTensor
from backends.cupy.transfer import CupyPages
from backends.numpylike import element_strides
from backends.placement import GPU_CALL_BYTES, PlacedBackend, PlacedContext
from backends.uploads import STAGED_BYTES, fill, lay_out
from ml.base import BaseTensor, Storage
from ml.base.checks import check_peers
from ml.capabilities import CacheConfig
from ml.devices import DeviceInfo, DeviceMemory
from ml.dtypes import DType
from ml.errors import DTypeError
from ml.ragged import RaggedPlan
from ml.strided import Shape, extent


class CupyBackend(PlacedBackend):
    """``open_backend("cupy", device="cuda:1")``, or ``devices=["cuda:0", "cuda:1"], layers=32``.

    A device is a name, a number or a ``cupy.cuda.Device``; with neither option it is the first one.

    ``stream=`` runs all work of the backend on one ``cupy.cuda.Stream``. Without it, work runs on the current
    stream of the calling thread, as everywhere in CuPy. That is the default stream, which orders the work of
    all threads, unless the caller entered another one; the caller must then order streams. ``to_numpy`` waits
    for its own stream.
    """

    def __init__(
        self,
        device: str | int | Any = None,
        devices: Sequence[str | int | Any] | None = None,
        layers: int | Sequence[int] | None = None,
        dtype: DType = DType.F32,
        stream: Any = None,
    ) -> None:
        self.places = find_places(device, devices, stream)
        super().__init__("cupy", [place.info() for place in self.places], layers, dtype)
        self.pages = CupyPages(self.places[0])

    def _new_context(self, max_graph_nodes: int) -> CupyContext:
        return CupyContext(self, max_graph_nodes)

    def cache_config(self) -> CacheConfig:
        """See ``ml.SupportsCacheConfig``."""
        return CacheConfig(call_bytes=GPU_CALL_BYTES)

    def ragged_attention(
        self,
        ctx: CupyContext,
        query: CupyTensor,
        key: Any,
        value: Any,
        plan: RaggedPlan,
        scale: float,
        sinks: CupyTensor | None = None,
        formats: tuple[str, str] | None = None,
    ) -> CupyTensor | None:
        """See ``ml.SupportsRaggedAttention``. None over codes."""
        ctx.check("ragged_attention")
        if formats is not None:
            return None
        check_peers("ragged_attention", self, query, key, value, sinks)
        return ragged_attention(ctx, query, key, value, plan, scale, sinks)

    def upload(self, ctx: CupyContext, arrays: Sequence[tuple[np.ndarray, DType]]) -> list[CupyTensor]:
        """See ``ml.SupportsTransfers``."""
        ctx.check("upload")
        hosts, starts, nbytes = lay_out(arrays)
        packed = np.empty(nbytes, np.uint8)
        fill(packed, hosts, starts)
        return ctx.unpacked(packed, starts, arrays)

    def _device_memory(self, index: int, device: DeviceInfo, allocated: int) -> DeviceMemory:
        return DeviceMemory(device.name, allocated, *self.places[index].memory())

    def pool_bytes(self, index: int = 0) -> tuple[int, int]:
        """(used, kept) bytes of CuPy's memory pool on a device, which all users of CuPy share."""
        self.check("pool_bytes")
        return self.places[index].pool()

    def close(self) -> None:
        if not self.closed:
            super().close()
            self.pages.close()
            for place in self.places:
                place.release()


class CupyContext(PlacedContext):
    """Creation on one device of the backend."""

    backend: CupyBackend

    def __init__(self, backend: CupyBackend, max_graph_nodes: int, device: int = 0) -> None:
        super().__init__(backend, max_graph_nodes, device)
        self.place = backend.places[device]

    def _empty(self, shape: Shape, dtype: DType) -> CupyTensor:
        nbytes = math.prod(shape) * dtype.itemsize
        with self.place.work("allocate", f"{nbytes} bytes for {shape} of {dtype!r}: "):
            memory = cupy.cuda.alloc(nbytes)
        storage = Storage(self.backend, memory, math.prod(shape), nbytes, self.device_index)
        return CupyTensor.whole(storage, dtype, shape)

    def _full(self, shape: Shape, value: float, dtype: DType) -> CupyTensor:
        result = self._empty(shape, dtype)
        if result.storage.size:
            with self.place.work("full"):
                pattern = np.dtype(f"i{dtype.itemsize}")  # fills the bits, for every dtype
                bits = np.array(value).astype(dtype.numpy).view(pattern)
                self._flat(result, pattern).fill(int(bits))
        return result

    def _arange(self, start: float, step: float, count: int, dtype: DType) -> BaseTensor:
        if not count or dtype not in (DType.I32, DType.I64):
            return super()._arange(start, step, count, dtype)
        with self.place.work("arange"):
            return CupyTensor.own(self, cupy.arange(start, start + count * step, step, dtype.numpy), dtype)

    def _from_array(self, array: np.ndarray, dtype: DType) -> CupyTensor:
        if 0 < array.size * dtype.itemsize <= STAGED_BYTES:
            host = np.array(array, order="C", copy=None).reshape(-1).view(np.uint8)
            storage = Storage(self.backend, self._staged(host), array.size, host.nbytes, self.device_index)
            return CupyTensor.whole(storage, dtype, array.shape)
        result = self._empty(array.shape, dtype)
        if result.storage.size:
            host = np.array(array, order="C", copy=None).reshape(-1).view(np.uint8)
            with self.place.work("from_numpy"):
                self._flat(result, host.dtype).set(host)
        return result

    def _staged(self, host: np.ndarray) -> Any:
        """U8 (bytes,), allocated and copied asynchronously through CuPy's own pinned memory."""
        with self.place.work("from_numpy", f"{host.nbytes} bytes: "):
            return cupy.asarray(host).data

    def unpacked(
        self, packed: np.ndarray, starts: Sequence[int], arrays: Sequence[tuple[np.ndarray, DType]]
    ) -> list[CupyTensor]:
        """Split an upload of ``backends.uploads`` on the device into storages in one allocation."""
        if not packed.size:
            return [self._empty(array.shape, dtype) for array, dtype in arrays]
        whole, made = self._staged(packed), []
        for start, (array, dtype) in zip(starts, arrays, strict=True):
            nbytes = array.size * dtype.itemsize
            storage = Storage(self.backend, whole + start, array.size, nbytes, self.device_index)
            made.append(CupyTensor.whole(storage, dtype, array.shape))
        return made

    def _flat(self, tensor: CupyTensor, dtype: np.dtype) -> Any:
        """All bytes of a new storage as one axis of ``dtype``."""
        return cupy.ndarray((tensor.nbytes // dtype.itemsize,), dtype, memptr=tensor.storage.array)

    def _from_native(self, array: Any) -> CupyTensor:
        if not isinstance(array, cupy.ndarray):
            other = "cupy.from_dlpack(it)" if hasattr(array, "__dlpack__") else "from_numpy"
            raise DTypeError(f"from_native: {type(array).__name__} is not a cupy.ndarray; use {other}")
        dtype = DType.from_numpy(array.dtype)
        strides = element_strides(array, dtype.itemsize)
        size = extent(array.shape, strides)
        index = int(array.device.id)
        places = [place.index for place in self.backend.places]
        device = self.backend.native_device(places, index, f"an array on cuda:{index}")
        storage = Storage(self.backend, array.data, size, 0, device, owned=False)
        return CupyTensor(storage, dtype, 0, array.shape, strides, array)
