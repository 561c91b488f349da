"""Attention of a ragged batch with custom MLX kernels, for Metal and, if MLX was built for it, CUDA."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from backends.mlx.arrays import MLX_DTYPES, from_host
from backends.ragged_kernel import MERGE, PARTS, THREADS, Shape, launch
from ml.ragged import RaggedPlan

if TYPE_CHECKING:
    from backends.mlx.tensor import MlxTensor

_COMMON = """
#define LOAD(x) static_cast<float>(x)
#define STORE(x) static_cast<T>(x)
"""
_METAL = """
#define SHARED threadgroup
#define BARRIER() metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup)
#define EXP(x) metal::exp(x)
#define WIDE int64_t
"""
_CUDA = """
#define SHARED __shared__
#define BARRIER() __syncthreads()
#define EXP(x) expf(x)
#define WIDE int64_t
"""
_METAL_PLACE = """
    const int me = thread_position_in_threadgroup.x;
    const int block_x = threadgroup_position_in_grid.x;
    const int block_y = threadgroup_position_in_grid.y;
"""
_CUDA_PLACE = """
    const int me = threadIdx.x;
    const int block_x = blockIdx.x;
    const int block_y = blockIdx.y;
"""
_STRIDES = "    const float scaling = scale[0];\n" + "".join(
    f"    const WIDE {name}_{axis} = {name}_strides[{axis}];\n"
    for name in ("query", "key", "value")
    for axis in range(3)
)
_INPUTS = {
    "ragged_parts": ["query", "key", "value", "plan", "work", "scale"],
    "ragged_merge": ["sums", "stats", "work", "sinks"],
}
_OUTPUTS = {"ragged_parts": ["sums", "stats"], "ragged_merge": ["out"]}


@functools.lru_cache(maxsize=128)
def _kernel(name: str, shape: Shape) -> Any:
    """MLX distinguishes kernels by name and template, not by source, so the name contains all definitions."""
    metal = mx.metal.is_available()
    make = mx.fast.metal_kernel if metal else mx.fast.cuda_kernel
    body = _STRIDES + PARTS if name == "ragged_parts" else MERGE
    return make(
        name="_".join([name, *map(str, shape.constants.values())]),
        input_names=_INPUTS[name],
        output_names=_OUTPUTS[name],
        source=(_METAL_PLACE if metal else _CUDA_PLACE) + body,
        header=shape.defines + _COMMON + (_METAL if metal else _CUDA),
        ensure_row_contiguous=False,  # keys and values are read in place
    )


@functools.lru_cache(maxsize=64)
def _number(value: float) -> Any:
    return from_host(np.array([value], np.float32))


def ragged_attention(
    ctx: Any,
    query: MlxTensor,
    key: MlxTensor,
    value: MlxTensor,
    plan: RaggedPlan,
    scale: float,
    sinks: MlxTensor | None,
) -> MlxTensor | None:
    """See ``ml.SupportsRaggedAttention``."""
    shape = Shape.of(query, key, value, sinks)
    if shape is None:
        return None
    done, stream = launch(ctx, plan, shape), query.storage.work.stream
    packed: Any = plan.packed(ctx)
    work: Any = done.work
    dtype, factor = MLX_DTYPES[query.dtype], _number(scale)
    options = {"template": [("T", dtype)], "threadgroup": (THREADS, 1, 1), "stream": stream}
    sums, stats = _kernel("ragged_parts", shape)(
        inputs=[*(x.read() for x in (query, key, value, packed, work)), factor],
        grid=(done.tasks * THREADS, shape.blocks, 1),  # MLX counts threads
        output_shapes=[(done.slots, shape.heads, shape.v_dim), (done.slots, shape.heads, 2)],
        output_dtypes=[mx.float32, mx.float32],
        **options,
    )
    logits = factor if sinks is None else mx.astype(sinks.read(), mx.float32, stream=stream)
    (out,) = _kernel("ragged_merge", shape)(
        inputs=[sums, stats, work.read(), mx.contiguous(logits, stream=stream)],
        grid=(plan.tokens * THREADS, shape.heads, 1),
        output_shapes=[(plan.tokens, shape.heads, shape.v_dim)],
        output_dtypes=[dtype],
        **options,
    )
    return query.wrap(out)
