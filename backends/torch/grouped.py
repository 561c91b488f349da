"""Products of rows with individual matrices, with torch's grouped kernel."""

from __future__ import annotations

import torch
from torch.nn import functional

from backends.torch.tensor import Placement, TorchTensor

KERNELS = (9, 10)
"""The major compute capabilities that torch has a kernel for. On others, and for F16 and F32, it multiplies
matrix by matrix, and waits for the device to learn the number of rows of each.
"""
ALIGNED_BYTES = 16
"""The alignment of the kernel's operands and of their rows."""


def multiply_grouped(
    ctx: Placement, x: TorchTensor, weight: TorchTensor, groups: TorchTensor
) -> TorchTensor | None:
    """See ``ml.SupportsGroupedMatmul``."""
    a, b, g = x.native_on(ctx), weight.native_on(ctx), groups.native_on(ctx)
    if not hasattr(functional, "grouped_mm") or 0 in (*a.shape, *b.shape):
        return None
    if not a.is_cpu and not _has_kernel(a):
        return None
    a = a.contiguous()
    if not (_aligned(a) and _aligned(b)):
        return None
    ends = torch.searchsorted(g, torch.arange(b.shape[0], dtype=g.dtype, device=g.device), right=True)
    return TorchTensor.own(ctx, functional.grouped_mm(a, b, offs=ends.to(torch.int32)), x.dtype)


def _has_kernel(a: torch.Tensor) -> bool:
    return (
        a.is_cuda
        and torch.version.hip is None
        and a.dtype is torch.bfloat16
        and torch.cuda.get_device_capability(a.device)[0] in KERNELS
    )


def _aligned(x: torch.Tensor) -> bool:
    """Whether the kernel supports the layout: rows or columns without gaps, each at an aligned address."""
    *matrix, outer, inner = x.stride()
    rows, columns = x.shape[-2:]
    if inner == 1 and outer >= columns:
        step = outer
    elif outer == 1 and inner >= rows:
        step = inner
    else:
        return False
    return not any(
        place % ALIGNED_BYTES
        for place in (x.data_ptr(), *(stride * x.element_size() for stride in (step, *matrix)))
    )
