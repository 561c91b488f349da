"""Backend and Context on Paddle, on the CPU."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import paddle

from ml import DeviceError, DeviceInfo, DType, DTypeError, ShapeError
from ml.base import BaseBackend, BaseContext, Storage, translating
from ml.strided import extent
from ml_backend_paddle.tensor import ERRORS, PADDLE, PaddleTensor, cast

DTYPES = {paddle_dtype: dtype for dtype, paddle_dtype in PADDLE.items()}


class PaddleBackend(BaseBackend):
    """``open_backend("paddle", device="cpu", dtype=DType.F32)``."""

    def __init__(self, device: str = "cpu", dtype: DType = DType.F32) -> None:
        if device != "cpu":
            raise DeviceError(f"open_backend: paddle has no device {device!r} here; its one device is 'cpu'")
        super().__init__("paddle", (DeviceInfo("cpu", "cpu", f"Paddle {paddle.__version__}"),), dtype)

    def _new_context(self, max_graph_nodes: int) -> PaddleContext:
        return PaddleContext(self, max_graph_nodes)


@translating(*ERRORS)
class PaddleContext(BaseContext):
    """Paddle computes when it is called: compute has nothing to do."""

    def own(self, array: paddle.Tensor, dtype: DType, shape: Any = None) -> PaddleTensor:
        """A tensor of new storage around an array that nobody else holds, cast to ``dtype``."""
        array = cast(array, dtype).contiguous()
        storage = Storage(self.backend, array, array.size, array.size * dtype.itemsize)
        return PaddleTensor.whole(storage, dtype, tuple(array.shape) if shape is None else shape)

    def _from_array(self, array: np.ndarray, dtype: DType) -> PaddleTensor:
        bits = array.view(np.uint16) if dtype is DType.BF16 else array  # what Paddle takes for bfloat16
        return self.own(paddle.to_tensor(np.array(bits, order="C").reshape(-1)), dtype, array.shape)

    def _empty(self, shape: tuple[int, ...], dtype: DType) -> PaddleTensor:
        return self.own(paddle.empty([math.prod(shape)], PADDLE[dtype]), dtype, shape)

    def _from_native(self, array: Any) -> PaddleTensor:
        if not isinstance(array, paddle.Tensor):
            raise DTypeError(f"from_native: {type(array).__name__} is no paddle.Tensor; use from_numpy")
        if array.dtype not in DTYPES:
            raise DTypeError(f"from_native: {array.dtype} is no dtype of ml; cast it first")
        if not array.place.is_cpu_place():
            raise DeviceError(f"from_native: a tensor on {array.place}; this backend is on the CPU")
        shape, strides = tuple(array.shape), tuple(array.strides)
        if min(strides, default=0) < 0:
            raise ShapeError(f"from_native: strides {strides}; they must not be negative, copy it first")
        dtype = DTYPES[array.dtype]
        offset = array.offset // dtype.itemsize
        storage = Storage(self.backend, array, offset + extent(shape, strides), 0, owned=False)
        return PaddleTensor(storage, dtype, offset, shape, strides)
