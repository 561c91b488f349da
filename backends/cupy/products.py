"""Products of F16 and BF16 with cuBLAS, which reads them in place and accumulates in F32. No operand is
widened in memory; one is copied, in its own 16 bits, only if neither of its last two axes is dense. The
result is F32, to be rounded once, since cuBLAS may round partial sums of a 16-bit result. cuBLAS uses
column-major matrices, so it computes the transposed product of the transposed matrices, which are the same
memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cupy
import numpy as np

from ml.dtypes import DType
from ml.strided import Shape

_ONE, _ZERO = np.ones(1, np.float32), np.zeros(1, np.float32)
_ITEM, _WIDE = 2, 4
"""Bytes of an operand's element, and of the result's."""


class _Matrices(NamedTuple):
    """The matrices of one operand: address, layout, and the strides between them."""

    address: int
    transposed: bool
    """Whether its columns are dense instead of its rows."""
    leading: int
    steps: Shape
    array: Any
    """The owner of the memory."""


def narrow_product(left: Any, right: Any, dtype: DType, out: Any) -> None:
    """Write ``numpy.matmul`` of two arrays of bits with two or more axes to ``out``, F32 and C-contiguous."""
    rows, inner = left.shape[-2:]
    columns = right.shape[-1]
    shape, (one, other) = _folded(out.shape[:-2], [_placed(x, out.shape[:-2]) for x in (left, right)])
    *outer, batch = shape or (1,)
    size = rows * columns
    cublas = cupy.cuda.cublas
    runtime = cupy.cuda.runtime
    kind = runtime.CUDA_R_16BF if dtype is DType.BF16 else runtime.CUDA_R_16F
    handle = cupy.cuda.get_cublas_handle()
    for count, where in enumerate(np.ndindex(*outer)):
        cublas.gemmStridedBatchedEx(
            handle, *(_operation(cublas, x) for x in (other, one)), columns, rows, inner, _ONE.ctypes.data,
            _at(other, where), kind, other.leading, other.steps[-1],
            _at(one, where), kind, one.leading, one.steps[-1],
            _ZERO.ctypes.data, out.data.ptr + count * batch * size * _WIDE, runtime.CUDA_R_32F, columns, size,
            batch, cublas.CUBLAS_COMPUTE_32F, cublas.CUBLAS_GEMM_DEFAULT,
        )  # fmt: skip


def _operation(cublas: Any, x: _Matrices) -> int:
    operation: int = cublas.CUBLAS_OP_T if x.transposed else cublas.CUBLAS_OP_N
    return operation


def _at(x: _Matrices, where: Shape) -> int:
    return x.address + _ITEM * sum(i * step for i, step in zip(where, x.steps[:-1], strict=True))


def _placed(array: Any, batch: Shape) -> _Matrices:
    """An operand in cuBLAS's form; its step is 0 if it is repeated over the batch."""
    rows, columns = array.shape[-2:]
    down, across = (stride // _ITEM for stride in array.strides[-2:])
    if (across == 1 or columns == 1) and (rows == 1 or down >= columns):
        transposed, leading = False, columns if rows == 1 else down
    elif (down == 1 or rows == 1) and (columns == 1 or across >= rows):
        transposed, leading = True, rows if columns == 1 else across
    else:
        return _placed(cupy.ascontiguousarray(array), batch)
    steps = [
        0 if size == 1 else stride // _ITEM
        for size, stride in zip(array.shape[:-2], array.strides[:-2], strict=True)
    ]
    return _Matrices(array.data.ptr, transposed, leading, (*[0] * (len(batch) - len(steps)), *steps), array)


def _folded(batch: Shape, operands: list[_Matrices]) -> tuple[Shape, list[_Matrices]]:
    """The batch with as few axes as the operands' steps allow, and the longest possible last axis."""
    shape: list[int] = []
    steps: list[list[int]] = [[] for _ in operands]
    for axis in reversed(range(len(batch))):
        size = batch[axis]
        here = [x.steps[axis] for x in operands]
        if size == 1:
            continue
        if shape and all(step == mine[0] * shape[0] for step, mine in zip(here, steps, strict=True)):
            shape[0] *= size
            continue
        shape.insert(0, size)
        for step, mine in zip(here, steps, strict=True):
            mine.insert(0, step)
    if not shape:
        return (1,), [x._replace(steps=(0,)) for x in operands]
    return tuple(shape), [x._replace(steps=tuple(mine)) for x, mine in zip(operands, steps, strict=True)]
