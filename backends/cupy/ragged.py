"""Attention of a ragged batch in CUDA C: two launches for any number of sequences."""

from __future__ import annotations

import functools
from typing import Any

import cupy
import numpy as np

from backends.cupy.tensor import CupyTensor
from backends.ragged_kernel import MERGE, PARTS, THREADS, Shape, launch
from ml.dtypes import DType
from ml.ragged import RaggedPlan

_ELEMENTS = {
    DType.F32: """
typedef float stored;
__device__ inline float LOAD(stored x) { return x; }
__device__ inline stored STORE(float x) { return x; }
""",
    # The hardware's conversion, without the need to find a header.
    DType.F16: """
typedef unsigned short stored;
__device__ inline float LOAD(stored x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
__device__ inline stored STORE(float x) {
    stored y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
""",
    DType.BF16: """
typedef unsigned short stored;
__device__ inline float LOAD(stored x) { return __uint_as_float((unsigned)x << 16); }
__device__ inline stored STORE(float x) {
    const unsigned bits = __float_as_uint(x);
    if (x != x) return 0x7fc0;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to nearest, ties to even
}
""",
}

_KERNELS = """
#define SHARED __shared__
#define BARRIER() __syncthreads()
#define EXP(x) expf(x)
#define WIDE long long

extern "C" __global__ void ragged_parts(
    const stored* query, const stored* key, const stored* value, const int* plan, const int* work,
    float scaling, WIDE query_0, WIDE query_1, WIDE query_2, WIDE key_0, WIDE key_1, WIDE key_2,
    WIDE value_0, WIDE value_1, WIDE value_2, float* sums, float* stats
) {
    const int me = threadIdx.x, block_x = blockIdx.x, block_y = blockIdx.y;
%s}

extern "C" __global__ void ragged_merge(
    const float* sums, const float* stats, const int* work, const float* sinks, stored* out
) {
    const int me = threadIdx.x, block_x = blockIdx.x, block_y = blockIdx.y;
%s}
"""


def source(dtype: DType, shape: Shape) -> str:
    """CUDA C of both kernels."""
    return shape.defines + _ELEMENTS[dtype] + _KERNELS % (PARTS, MERGE)


@functools.lru_cache(maxsize=64)
def _module(dtype: DType, shape: Shape) -> Any:
    return cupy.RawModule(code=source(dtype, shape), options=("-std=c++17",))


def ragged_attention(
    ctx: Any,
    query: CupyTensor,
    key: CupyTensor,
    value: CupyTensor,
    plan: RaggedPlan,
    scale: float,
    sinks: CupyTensor | None,
) -> CupyTensor | None:
    """See ``ml.SupportsRaggedAttention``. Also None if the buffers are on another device."""
    shape = Shape.of(query, key, value, sinks)
    if shape is None or any(x is not None and x.place is not ctx.place for x in (query, key, value, sinks)):
        return None
    done = launch(ctx, plan, shape)
    logits = done.work if sinks is None else sinks.cast(ctx, DType.F32)  # read only if there are sinks
    sums = ctx.empty((done.slots, shape.heads, shape.v_dim), DType.F32)
    stats = ctx.empty((done.slots, shape.heads, 2), DType.F32)
    out: CupyTensor = ctx.empty((plan.tokens, shape.heads, shape.v_dim), query.dtype)
    module = _module(query.dtype, shape)
    strides = [np.int64(step) for x in (query, key, value) for step in x.strides]
    arrays = [x.native for x in (query, key, value, plan.packed(ctx), done.work)]
    with ctx.place.work("ragged_attention"):
        parts, merge = (module.get_function(name) for name in ("ragged_parts", "ragged_merge"))
        kept = [x.native for x in (sums, stats)]
        parts((done.tasks, shape.blocks), (THREADS,), (*arrays, np.float32(scale), *strides, *kept))
        merge((plan.tokens, shape.heads), (THREADS,), (*kept, done.work.native, logits.native, out.native))
    return out
