"""Backend and Context on PyTorch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy as np
import torch

from backends.cpu_store import CodesStore
from backends.host_memory import HUGE_PAGE, advise, aligned
from backends.placement import GPU_CALL_BYTES, PlacedBackend, PlacedContext
from backends.torch.attention import attend
from backends.torch.convert import FROM_TORCH, TO_TORCH, fill_from_host, pack, takes, translated
from backends.torch.devices import device_memory, find_places, release
from backends.torch.distributed import TorchGroup, join
from backends.torch.formats import decoded, encoded
from backends.torch.grouped import multiply_grouped
from backends.torch.kernels import CausalMasks
from backends.torch.partial import DecodingStep, attend_calls, attend_partially, decoding_step
from backends.torch.quantized import attend_quantized, quantized_store
from backends.torch.quantized import encode as compiled
from backends.torch.ragged import attend_ragged
from backends.torch.store import TorchKVStore, alias
from backends.torch.tensor import TorchStorage, TorchTensor, UploadedStorage
from backends.torch.transfer import TorchPages
from ml.base import BaseGroup, BaseTensor
from ml.capabilities import AttentionCall, CacheConfig, CausalMask, Layout
from ml.devices import DeviceInfo, DeviceMemory
from ml.dtypes import DType
from ml.errors import DeviceError, DTypeError, GroupError
from ml.ragged import RaggedPlan
from ml.strided import LARGEST_NDIM, Shape, check_ndim, contiguous_strides, overlaps_itself

_Method = TypeVar("_Method", bound=Callable[..., Any])
LAZY = 128 << 10
"""Bytes from which zeros take no memory before they are written: glibc maps what is larger."""


def _guarded(method: _Method) -> _Method:
    """Check that the context is open, and translate torch's errors, naming the operation and the device."""
    op = method.__name__

    @functools.wraps(method)
    def call(self: TorchBackend, ctx: TorchContext, *args: Any, **options: Any) -> Any:
        if ctx.active_backend is None or self.closed:
            ctx.check(op)
        try:
            return method(self, ctx, *args, **options)
        except (RuntimeError, IndexError, MemoryError) as error:
            raise translated(op, error, ctx.device) from error

    return cast("_Method", call)


class TorchBackend(PlacedBackend):
    """``open_backend("torch", device="cuda:1")``, or ``devices=["cuda:0", "cuda:1"], layers=32``.

    Layers are split evenly over the devices, in order: ``Context.layer(i)`` gives the context on
    the device of layer ``i``. With neither option the device is the first CUDA one, else the CPU.
    """

    strided_view = staticmethod(alias)
    """(tensor, size, strides, offset) -> a view from ``offset`` elements on, with unchecked bounds."""

    def __init__(
        self,
        device: str | torch.device | None = None,
        devices: Sequence[str | torch.device] | None = None,
        layers: int | Sequence[int] | None = None,
        dtype: DType = DType.F32,
    ) -> None:
        self.places = find_places(device, devices)
        super().__init__("torch", [place.info() for place in self.places], layers, dtype)
        self.foreign = tuple(TorchStorage(self, i, None) for i in range(len(self.places)))
        self.causal_masks = CausalMasks()
        self._step: tuple[object, DecodingStep | None] = None, None
        """The calls of the last pass that decoded over runs of cells, and how its layers attend."""
        self.group: BaseGroup | None = None
        self.settle: Callable[[str], None] | None = None
        """Set by a group of several ranks; called before the host waits for a result."""
        self.pages = TorchPages() if any(place.device.type == "cuda" for place in self.places) else None

    def _new_context(self, max_graph_nodes: int) -> TorchContext:
        return TorchContext(self, max_graph_nodes)

    def _device_memory(self, index: int, device: DeviceInfo, allocated: int) -> DeviceMemory:
        return DeviceMemory(device.name, allocated, *device_memory(self.places[index]))

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self.pages is not None:
                self.pages.close()
            self.causal_masks.clear()
            self._step = None, None
            if self.group is not None:
                self.group.close()
            release(self.places)

    def cache_config(self) -> CacheConfig:
        """Head-major, since attention reads each head's keys in one run; masks in our default dtype."""
        config = CacheConfig(layout=Layout.HEAD_MAJOR, elide_mask=True, mask_dtype=self.dtype)
        on_cpu = self.places[0].device.type == "cpu"
        return config if on_cpu else replace(config, call_bytes=GPU_CALL_BYTES)

    def distributed(self, timeout: float = 60.0) -> BaseGroup:
        """See ``ml.SupportsDistributed``. gloo between CPUs, NCCL between CUDA devices."""
        self.check("distributed")
        if self.group is not None and not self.group.closed:
            raise GroupError(f"distributed: {self.group!r} is open on this backend; close it first")
        self.group = join(self, self.places[0].device, timeout)
        self.settle = self.group.settle if isinstance(self.group, TorchGroup) else None
        return self.group

    def borrow(self, ctx: TorchContext, array: np.ndarray) -> BaseTensor:
        """See ``ml.SupportsHostMemory``. In place on the CPU if torch accepts the memory."""
        ctx.check("borrow")
        dtype = DType.from_numpy(array.dtype)
        if ctx.torch_device.type != "cpu" or not array.flags.c_contiguous or not takes(array):
            return ctx.from_numpy(array, dtype)
        host = array.view(np.int16) if dtype is DType.BF16 else array
        return ctx.from_native(torch.from_numpy(host).view(TO_TORCH[dtype]))

    def upload(self, ctx: TorchContext, arrays: Sequence[tuple[np.ndarray, DType]]) -> list[BaseTensor]:
        """See ``ml.SupportsTransfers``. On CUDA one copy from pinned memory; elsewhere one copy per array."""
        made: list[BaseTensor] = []
        if ctx.torch_device.type != "cuda":
            for array, dtype in arrays:
                native = ctx.from_numpy(array, dtype).native
                made.append(TorchTensor(native, dtype, UploadedStorage(self, ctx.device_index, native)))
            return made
        ctx.check("upload")
        packed, starts = pack(arrays)
        whole = ctx.empty((packed.numel(),), DType.U8).native
        whole.copy_(packed, non_blocking=True)
        storage = UploadedStorage(self, ctx.device_index, whole)
        for start, (array, dtype) in zip(starts, arrays, strict=True):
            part = whole.narrow(0, start, array.size * dtype.itemsize).view(TO_TORCH[dtype])
            made.append(TorchTensor(part.view(array.shape), dtype, storage))
        return made

    def overwrite(self, ctx: TorchContext, tensor: TorchTensor) -> np.ndarray | None:
        """See ``ml.SupportsHostMemory``. None on a GPU, and for a tensor that records gradients."""
        ctx.check("overwrite", tensor)
        native = tensor.native
        if not native.is_cpu or native.requires_grad or overlaps_itself(tensor.shape, tensor.strides):
            return None
        if native.is_neg():  # a lazily negated view, whose memory NumPy cannot use
            return None
        host: np.ndarray = (native.view(torch.int16) if tensor.dtype is DType.BF16 else native).numpy()
        return host.view(tensor.dtype.numpy)

    def kv_store(
        self, key: Any, value: Any, formats: tuple[str, str] | None = None
    ) -> TorchKVStore | CodesStore | None:
        """See ``ml.SupportsKVStorage``. None on MPS, where addresses are not comparable."""
        if formats is not None:
            return quantized_store(self, key, value, formats)
        if key.dtype is not value.dtype or key.native.device != value.native.device or key.native.is_mps:
            return None
        return TorchKVStore(self, key, value)

    @_guarded
    def attention(
        self,
        ctx: TorchContext,
        query: TorchTensor,
        key: TorchTensor,
        value: TorchTensor,
        mask: TorchTensor | CausalMask | None,
        scale: float,
        sinks: TorchTensor | None = None,
    ) -> TorchTensor:
        """See ``ml.SupportsAttention``. Keys and values may be strided; they are not copied."""
        return attend(ctx, self.causal_masks, query, key, value, mask, scale, sinks)

    @_guarded
    def attention_calls(
        self,
        ctx: TorchContext,
        query: TorchTensor,
        key: TorchTensor,
        value: TorchTensor,
        levels: Sequence[Sequence[AttentionCall]],
        scale: float,
        sinks: TorchTensor | None = None,
    ) -> TorchTensor:
        """See ``ml.SupportsPartialAttention``."""
        if sinks is None:
            known, step = self._step
            if known is not levels:
                step = decoding_step(ctx, query, key, value, levels)
                if step is not None:  # other calls may have tensors, which would be kept
                    self._step = levels, step
            result = step and step(ctx, query, key, value, scale)
            if result is not None:
                return result
        return attend_calls(ctx, self.causal_masks, query, key, value, levels, scale, sinks)

    def quantize(self, ctx: TorchContext, x: TorchTensor, format: str) -> tuple[TorchTensor, ...] | None:
        """See ``ml.SupportsKVStorage``."""
        ctx.check("quantize")
        return compiled(ctx, x, format) or encoded(ctx, x, format)

    def dequantize(self, ctx: TorchContext, parts: Sequence[TorchTensor], format: str) -> TorchTensor | None:
        """See ``ml.SupportsKVStorage``."""
        ctx.check("dequantize")
        return decoded(ctx, parts, format)

    @_guarded
    def partial_attention(
        self,
        ctx: TorchContext,
        query: TorchTensor,
        key: TorchTensor,
        value: TorchTensor,
        mask: TorchTensor | CausalMask | None,
        scale: float,
    ) -> tuple[TorchTensor, TorchTensor]:
        """See ``ml.SupportsPartialAttention``."""
        return attend_partially(ctx, self.causal_masks, query, key, value, mask, scale)

    @_guarded
    def ragged_attention(
        self,
        ctx: TorchContext,
        query: TorchTensor,
        key: Any,
        value: Any,
        plan: RaggedPlan,
        scale: float,
        sinks: TorchTensor | None = None,
        formats: tuple[str, str] | None = None,
    ) -> TorchTensor | None:
        """See ``ml.SupportsRaggedAttention``. By numba on the CPU, by Triton on CUDA; None without."""
        ctx.check("ragged_attention")
        if formats is not None:
            return attend_quantized(ctx, query, key, value, formats, plan, scale, sinks)
        return attend_ragged(ctx, query, key, value, plan, scale, sinks)

    @_guarded
    def grouped_matmul(
        self, ctx: TorchContext, x: TorchTensor, weight: TorchTensor, groups: TorchTensor
    ) -> TorchTensor | None:
        """See ``ml.SupportsGroupedMatmul``. On CUDA only for BF16, since torch synchronizes with the device
        for others.
        """
        return multiply_grouped(ctx, x, weight, groups)


def _zeros(shape: Shape, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """In memory of the host that is given when it is first written: most of a cache is still empty."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < LAZY:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory: Any = torch.from_numpy(aligned(nbytes, np.zeros)).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(memory, 0, tuple(shape), contiguous_strides(shape))


class TorchContext(PlacedContext):
    """Creation on one device of the backend. Contexts of its layers close with it."""

    backend: TorchBackend

    def __init__(self, backend: TorchBackend, max_graph_nodes: int, device: int = 0) -> None:
        super().__init__(backend, max_graph_nodes, device)
        self.torch_device = backend.places[device].device
        self.moves = len({place.device for place in backend.places}) > 1
        self._foreign = backend.foreign[device]

    def from_native(self, array: Any) -> TorchTensor:
        if self.active_backend is None or self.backend.closed:
            self.check("from_native")
        if (
            type(array) is torch.Tensor
            and array.device == self.torch_device
            and array.dtype in FROM_TORCH
            and array.layout is torch.strided
            and not array.requires_grad
            and not array.is_nested
            and array.dim() <= LARGEST_NDIM
        ):
            # TorchTensor.__init__, inlined: each layer of a decoding step has three.
            tensor = object.__new__(TorchTensor)
            tensor.native, tensor.dtype, tensor.storage = array, FROM_TORCH[array.dtype], self._foreign
            tensor.backend, tensor.known_shape = self.backend, None
            return tensor
        return self._from_native(array)

    def _from_native(self, array: Any) -> TorchTensor:
        if not isinstance(array, torch.Tensor):
            raise DTypeError(f"from_native: {type(array).__name__} is not a torch.Tensor; use from_numpy")
        if array.is_nested:
            raise DTypeError("from_native: a nested tensor; it must have one shape: call to_padded_tensor(0)")
        if array.layout is not torch.strided:
            raise DTypeError(
                f"from_native: layout {array.layout}; the tensor must be strided; call to_dense()"
            )
        if array.dtype not in FROM_TORCH:
            known = ", ".join(str(dtype) for dtype in FROM_TORCH)
            raise DTypeError(
                f"from_native: no DType for {array.dtype}; convert it, with .float() for example; "
                f"there are DTypes for {known}"
            )
        check_ndim("from_native", array.dim())
        storage = self._foreign
        if array.device != self.torch_device:
            devices = [place.device for place in self.backend.places]
            place = self.backend.native_device(devices, array.device, f"a tensor on {array.device}")
            storage = self.backend.foreign[place]
        return TorchTensor(array.detach(), FROM_TORCH[array.dtype], storage)

    def _allocate(self, make: Callable[..., torch.Tensor], *args: Any, dtype: DType) -> TorchTensor:
        """``make(shape, ...)`` on this device; the error names bytes and device if there is no memory."""
        try:
            if torch.is_inference_mode_enabled():  # tensors created in it can be written only in it
                with torch.inference_mode(False):
                    array = make(*args, dtype=TO_TORCH[dtype], device=self.torch_device)
            else:
                array = make(*args, dtype=TO_TORCH[dtype], device=self.torch_device)
        except (RuntimeError, TypeError, ValueError, OverflowError, MemoryError) as error:
            reason = str(error).strip().split("\n", 1)[0]
            raise DeviceError(
                f"allocate: {math.prod(args[0]) * dtype.itemsize} bytes for {args[0]} of {dtype!r} "
                f"on {self.device}: {reason}"
            ) from error
        return TorchTensor.own(self, array, dtype)

    def _empty(self, shape: Shape, dtype: DType) -> TorchTensor:
        tensor = self._allocate(torch.empty, shape, dtype=dtype)
        large = tensor.nbytes >= HUGE_PAGE and self.torch_device.type == "cpu"
        if large and not torch.compiler.is_compiling():
            advise(tensor.native.data_ptr(), tensor.nbytes)
        return tensor

    def _full(self, shape: Shape, value: float, dtype: DType) -> TorchTensor:
        if value == 0 and math.copysign(1.0, value) > 0:
            if self.torch_device.type == "cpu" and not torch.compiler.is_compiling():
                return self._allocate(_zeros, shape, dtype=dtype)
            tensor = self._empty(shape, dtype)
            tensor.native.zero_()
            return tensor
        return self._allocate(torch.full, shape, value, dtype=dtype)

    def _arange(self, start: float, step: float, count: int, dtype: DType) -> BaseTensor:
        # Floats must be rounded once, which torch does not guarantee; its stop must fit 64 bits.
        if dtype.is_float or not count or max(abs(start), abs(start + count * step)) > 1 << 62:
            return super()._arange(start, step, count, dtype)
        return self._allocate(self._integers, (count,), start, step, dtype=dtype)

    @staticmethod
    def _integers(shape: Shape, start: int, step: int, **options: Any) -> torch.Tensor:
        return torch.arange(start, start + shape[0] * step, step, **options)

    def _from_array(self, array: np.ndarray, dtype: DType) -> TorchTensor:
        result = self._empty(array.shape, dtype)
        fill_from_host(result.native, array, dtype)
        return result
