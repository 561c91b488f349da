"""Attention of a ragged batch on the CPU, by numba's kernels over MLX's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from backends import cpu_attention
from backends.cpu_attention import BITS, Array, Stored, address
from backends.mlx.arrays import MLX_DTYPES, from_host
from ml.dtypes import DType
from ml.ragged import RaggedPlan
from ml.strided import contiguous_strides

if TYPE_CHECKING:
    from backends.mlx.tensor import MlxTensor


def host_attention(
    query: MlxTensor,
    key: Sequence[MlxTensor],
    value: Sequence[MlxTensor],
    formats: tuple[str, str] | None,
    plan: RaggedPlan,
    scale: float,
    sinks: MlxTensor | None,
) -> MlxTensor | None:
    """See ``ml.SupportsRaggedAttention``. K and V are read in place, after the work that they and the queries
    depend on, which is finished here. None without numba, and for operands that its kernels do not read.
    """
    parts = [*key, *value]
    if formats is None:
        if not query.dtype is key[0].dtype is value[0].dtype:
            return None
        formats = query.dtype.name, query.dtype.name
    elif not BITS.keys() >= set(formats):
        return None
    if (
        not query.dtype.is_float
        or any(0 in x.shape for x in (query, *parts))
        or cpu_attention.kernels() is None
    ):
        return None
    work, logits = query.storage.work, None if sinks is None else sinks.to_numpy().astype(np.float32)
    with work.lock:  # nothing else may replace the arrays meanwhile
        asked = mx.contiguous(query.read(), stream=work.stream)
        for part in parts:
            part.storage.settle()
        with work.waiting("ragged_attention"):
            mx.eval(asked, *(part.storage.array for part in parts))
        whole = _array(asked, query.dtype, 0, query.shape, contiguous_strides(query.shape))
        q = Stored.of([whole], query.dtype.name)
        keys, values = (
            Stored.of([_array(x.storage.array, x.dtype, x.offset, x.shape, x.strides) for x in one], name)
            for one, name in zip((key, value), formats, strict=True)
        )
        if q is None or keys is None or values is None:
            return None
        launch = cpu_attention.launch_of("ragged_attention", plan, q.shape, keys.shape, values.shape)
        out = np.empty((*q.shape[:2], launch.v_dim), np.float32)
        launch.run(q.arguments[:4], keys.arguments, values.arguments, scale, logits, 1, address(out))
    return query.wrap(mx.astype(from_host(out), MLX_DTYPES[query.dtype], stream=work.stream))


def _array(array: Any, dtype: DType, offset: int, shape: Sequence[int], strides: Sequence[int]) -> Array:
    """A view of an array in C order that has been computed."""
    size = dtype.itemsize
    start = address(np.frombuffer(array, np.uint8)) + offset * size
    return Array(start, shape, [stride * size for stride in strides], size)
