"""Backend and Context on MLX."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np

from backends.mlx import fused
from backends.mlx.arrays import MLX_DTYPES, from_host, from_mlx_dtype, scalar, schedule
from backends.mlx.distributed import MlxGroup, join
from backends.mlx.errors import device_errors
from backends.mlx.formats import decoded, encoded
from backends.mlx.host_attention import host_attention
from backends.mlx.quantized import quantized_attention
from backends.mlx.ragged import ragged_attention
from backends.mlx.storage import SIZE_LIMIT, WAIT_BYTES, MlxStorage
from backends.mlx.store import MlxKVStore, MlxQuantizedStore
from backends.mlx.tensor import MlxTensor
from backends.mlx.work import MlxWork
from backends.placement import GPU_CALL_BYTES, only_device
from ml.base import BaseBackend, BaseContext, BaseGroup, BaseTensor, check_attention
from ml.base.checks import check_peers
from ml.capabilities import CacheConfig, CausalMask, Layout
from ml.devices import DeviceInfo, DeviceMemory
from ml.dtypes import DType
from ml.errors import DeviceError, DTypeError, GroupError
from ml.host import host_memory
from ml.nn.partial import partial_in_blocks
from ml.nn.rope_spec import RopeSpec
from ml.protocols import Tensor
from ml.ragged import RaggedPlan
from ml.strided import Shape, check_ndim, contiguous_strides, overlaps_itself


class MlxBackend(BaseBackend):
    """``open_backend("mlx", device=None, dtype=DType.F32)``; device "gpu" or "cpu", None: the best available.
    ``devices=["gpu"], layers=32`` is equivalent; several devices are refused.

    ``work``: the stream on which everything runs, and its pending work.
    """

    def __init__(
        self,
        device: str | None = None,
        dtype: DType = DType.F32,
        devices: Sequence[str] | None = None,
        layers: int | None = None,
    ) -> None:
        target = _device(only_device("mlx", device, devices, layers))
        if target.type == mx.gpu:  # MLX reads it at its first product; the contract requires F32
            os.environ.setdefault("MLX_ENABLE_TF32", "0")
        super().__init__("mlx", (_device_info(target),), dtype)
        memory = _total_memory(self.devices[0].kind) or sys.maxsize
        self.work = MlxWork(target.type == mx.gpu, memory)
        self.fused_rope = target.type == mx.gpu
        """On the CPU, mx.fast.rope is slower than the generic implementation, whose tables are shared by all
        layers.
        """
        self.group: BaseGroup | None = None

    def _new_context(self, max_graph_nodes: int) -> MlxContext:
        return MlxContext(self, max_graph_nodes)

    def shared_stream(self) -> contextlib.AbstractContextManager[None]:
        """A context in which this thread's own calls of MLX run on the backend's stream, so that they and the
        tensors of one pass form one graph: ``from_native`` and ``native`` schedule nothing. At the end the
        tensors are submitted, and nothing that no tensor holds or needs. Other threads that use the device
        wait until then, so do not wait for one of them inside.
        """
        self.check("shared_stream")
        return self.work.shared()

    def natives(self, *tensors: MlxTensor) -> list[Any]:
        """``native`` of each, scheduled together, since that takes as long as scheduling one."""
        self.check("native")
        arrays = [tensor.read().__copy__() for tensor in tensors]
        if not self.work.shared_here:
            self.work.flush(*arrays)
        return arrays

    # Capabilities.

    def distributed(self, timeout: float = 60.0) -> BaseGroup:
        """See ``ml.SupportsDistributed``. MLX joins once per process, so all groups have the same ranks."""
        self.check("distributed")
        if self.group is not None and not self.group.closed:
            raise GroupError(f"distributed: {self.group!r} is open on this backend; close it first")
        self.group = join(self, self.work, timeout)
        self.work.ranks = self.group if isinstance(self.group, MlxGroup) else None
        return self.group

    def kv_store(
        self, key: Any, value: Any, formats: tuple[str, str] | None = None
    ) -> MlxKVStore | MlxQuantizedStore | None:
        """See ``ml.SupportsKVStorage``."""
        if formats is None:
            return MlxKVStore.over(self, self.work, key, value)
        return MlxQuantizedStore.over(self, self.work, (*key, *value), formats)

    def borrow(self, ctx: Any, array: np.ndarray) -> BaseTensor:
        """See ``ml.SupportsHostMemory``. Always a copy: MLX has no arrays over foreign memory."""
        copied: BaseTensor = ctx.from_numpy(array, DType.from_numpy(array.dtype))
        return copied

    def overwrite(self, ctx: Any, tensor: MlxTensor) -> np.ndarray | None:
        """See ``ml.SupportsHostMemory``. None on a GPU."""
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
        config = CacheConfig(mask_dtype=self.dtype, layout=Layout.HEAD_MAJOR, elide_mask=True)
        on_cpu = self.devices[0].kind == "cpu"
        return config if on_cpu else replace(config, call_bytes=GPU_CALL_BYTES)

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
        check_attention("attention", self, query, key, value, mask, sinks)
        with device_errors("attention"):
            return fused.attention(ctx, query, key, value, mask, scale, sinks)

    def quantize(self, ctx: Any, x: MlxTensor, format: str) -> tuple[MlxTensor, ...] | None:
        """See ``ml.SupportsKVStorage``."""
        ctx.check("quantize", x)
        with device_errors("quantize"):
            return encoded(x, format)

    def dequantize(self, ctx: Any, parts: Sequence[MlxTensor], format: str) -> MlxTensor | None:
        """See ``ml.SupportsKVStorage``."""
        ctx.check("dequantize", parts[0])
        with device_errors("dequantize"):
            return decoded(parts, format)

    def partial_attention(
        self, ctx: Any, query: Any, key: Any, value: Any, mask: Tensor | CausalMask | None, scale: float
    ) -> Any:
        """See ``ml.SupportsPartialAttention``."""
        ctx.check("partial_attention")
        check_attention("partial_attention", self, query, key, value, mask, batched=True)
        with device_errors("partial_attention"):
            body = functools.partial(fused.partial_attention, scale)
            return partial_in_blocks(ctx, body, query, key, value, mask)

    def attention_calls(self, ctx: Any, *call: Any) -> None:
        """See ``ml.SupportsPartialAttention``. None: a lazy graph gains nothing from it."""

    def ragged_attention(
        self,
        ctx: Any,
        query: Any,
        key: Any,
        value: Any,
        plan: RaggedPlan,
        scale: float,
        sinks: Any = None,
        formats: tuple[str, str] | None = None,
    ) -> Any:
        """See ``ml.SupportsRaggedAttention``. On the CPU by numba, but for affine groups."""
        ctx.check("ragged_attention")
        stored = [key, value] if formats is None else [*key, *value]
        check_peers("ragged_attention", self, query, *stored, sinks)
        with device_errors("ragged_attention"):
            if formats is not None:
                result = quantized_attention(query, key, value, formats, plan, scale, sinks)
                if result is not None or self.devices[0].kind != "cpu":
                    return result
                return host_attention(query, key, value, formats, plan, scale, sinks)
            if self.devices[0].kind == "cpu":
                return host_attention(query, [key], [value], None, plan, scale, sinks)
            return ragged_attention(ctx, query, key, value, plan, scale, sinks)

    def rope(self, ctx: Any, x: Any, positions: Any, spec: RopeSpec) -> Any:
        ctx.check("rope")
        return fused.rope(x, positions, spec) if self.fused_rope else None

    def grouped_matmul(self, ctx: Any, x: Any, weight: Any, groups: Any) -> Any:
        """See ``ml.SupportsGroupedMatmul``."""
        ctx.check("grouped_matmul")
        with device_errors("grouped_matmul"):
            return fused.grouped_matmul(x, weight, groups)

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
        """Free the arrays of all tensors, even referenced ones, and MLX's cache of freed buffers."""
        with self.work.lock:
            if self.closed:
                return
            super().close()
            if isinstance(self.group, MlxGroup):
                whole = self.group.finish(self.work.stream)
            else:
                whole = True
                mx.synchronize(self.work.stream)
            if self.group is not None:
                self.group.close()
            self.work.discard()
            self.allocations.clear()
            if whole:  # a stream that waits for a lost rank would keep it
                mx.clear_cache()


class MlxContext(BaseContext):
    """Creation of tensors. ``forward`` records nothing, since the backend knows all pending work."""

    backend: MlxBackend

    def _own(self, array: Any, dtype: DType) -> MlxTensor:
        """A new storage, in C order, around an array without other references."""
        storage = MlxStorage.around(self.backend, self.backend.work, array, raw=False)
        if storage.nbytes >= WAIT_BYTES:
            self.backend.work.flush()  # allocate now, so that a lack of memory shows here
        return MlxTensor.whole(storage, dtype, storage.shape)

    def _empty(self, shape: Shape, dtype: DType) -> MlxTensor:
        return self._full(shape, 0, dtype)  # MLX has no uninitialised arrays

    def _full(self, shape: Shape, value: float, dtype: DType) -> MlxTensor:
        with device_errors("allocate"):
            fill = from_host(scalar(value, dtype))
            array = mx.full(shape, fill, MLX_DTYPES[dtype], stream=self.backend.work.stream)
        return self._own(array, dtype)

    def _from_array(self, array: np.ndarray, dtype: DType) -> MlxTensor:
        with device_errors("from_numpy"):
            return self._own(from_host(array), dtype)

    def _from_native(self, array: Any) -> MlxTensor:
        """The current value: MLX's ``x[...] = y`` gives the Python object a new array, which this tensor does
        not see; neither does a write through the tensor change ``array``.
        """
        if not isinstance(array, mx.array):
            raise DTypeError(f"from_native: {type(array).__name__} is not an mlx.core.array; use from_numpy")
        dtype = from_mlx_dtype("from_native", array.dtype)
        check_ndim("from_native", array.ndim)
        if array.size > SIZE_LIMIT:
            raise DeviceError(f"from_native: {array.size} elements; views support at most {SIZE_LIMIT}")
        with self.backend.work.lock, device_errors("from_native"):
            if not self.backend.work.shared_here:
                schedule(array)  # in this thread, to which pending work of another stream may be bound
            storage = MlxStorage(self.backend, self.backend.work, array.__copy__(), owned=False)
        return MlxTensor(storage, dtype, 0, storage.shape, contiguous_strides(storage.shape))

    def _compute(self, tensors: tuple[BaseTensor, ...]) -> None:
        """Submit all pending work to the stream; readers of results wait."""
        self.backend.work.flush(
            *(tensor.storage.array for tensor in tensors if isinstance(tensor, MlxTensor))
        )


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
