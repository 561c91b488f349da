"""Uploads several host arrays in one transfer, concatenated."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ml.base.checks import cast_host
from ml.dtypes import DType

STAGED_BYTES = 16 << 20
"""Up to this many bytes, such as the data of a pass, use the framework's own pinned memory on CUDA. With
other memory, the host may wait for all earlier work of the device.
"""
APART = 64
"""The alignment in bytes of arrays uploaded together."""


def lay_out(arrays: Sequence[tuple[np.ndarray, DType]]) -> tuple[list[np.ndarray], list[int], int]:
    """The arrays in these dtypes, the byte offset of each, and the total bytes."""
    hosts = [np.ascontiguousarray(array if array.dtype == dtype.numpy else cast_host(array, dtype))
             for array, dtype in arrays]  # fmt: skip
    starts = [0]
    for host in hosts:
        starts.append(-(-(starts[-1] + host.nbytes) // APART) * APART)
    return hosts, starts[:-1], starts[-1]


def fill(memory: np.ndarray, hosts: Sequence[np.ndarray], starts: Sequence[int]) -> None:
    """Write the arrays into memory U8 (bytes,)."""
    for start, host in zip(starts, hosts, strict=True):
        memory[start : start + host.nbytes] = host.reshape(-1).view(np.uint8)
