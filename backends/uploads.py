"""Arrays of the host that go to a device in one transfer: one behind the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ml.base.checks import cast_host
from ml.dtypes import DType

STAGED_BYTES = 16 << 20
"""Up to so much, such as what a pass needs, goes to CUDA by the framework's own pinned memory. With other
memory the host may wait until the device has done all that it was asked to do before."""
APART = 64
"""Bytes at whose multiples arrays begin that go together."""


def lay_out(arrays: Sequence[tuple[np.ndarray, DType]]) -> tuple[list[np.ndarray], list[int], int]:
    """The arrays in these dtypes, the byte that each begins at, and how many bytes they take."""
    hosts = [np.ascontiguousarray(array if array.dtype == dtype.numpy else cast_host(array, dtype))
             for array, dtype in arrays]  # fmt: skip
    starts = [0]
    for host in hosts:
        starts.append(-(-(starts[-1] + host.nbytes) // APART) * APART)
    return hosts, starts[:-1], starts[-1]


def fill(memory: np.ndarray, hosts: Sequence[np.ndarray], starts: Sequence[int]) -> None:
    """Write them into memory U8 (bytes,)."""
    for start, host in zip(starts, hosts, strict=True):
        memory[start : start + host.nbytes] = host.reshape(-1).view(np.uint8)
