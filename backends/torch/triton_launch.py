"""Launches compiled Triton kernels without Triton's inspection of their arguments."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import triton
from triton.compiler import CompiledKernel

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether TRITON_INTERPRET was set when this module was imported: kernels then run on the host."""
COMPILED_LIMIT = 1024
_compiled: dict[Hashable, CompiledKernel] = {}
"""By everything that determines Triton's compilation of a kernel."""


def launch(
    function: Any,
    grid: tuple[int, int],
    tensors: Sequence[torch.Tensor],
    floats: Sequence[float],
    integers: Sequence[int],
    constants: dict[str, Any],
    warps: int,
    stages: int,
) -> None:
    """``function[grid](*tensors, *floats, *integers, **constants)`` on the current device.

    All of them are in the order of its parameters.

    The kernel compiled for arguments like these is launched directly, since Triton's lookup inspects each
    argument, which takes about 50 us on the host. Kernels are specialized for dtypes and constants, for
    integers that are 1, multiples of 16 or wider than 32 bits, and for memory aligned to 16 bytes.
    """
    key: Hashable = None
    if not INTERPRETED:
        places = [tensor.data_ptr() for tensor in tensors]
        key = (
            id(function), tensors[0].device.index, tuple([tensor.dtype for tensor in tensors]),
            tuple([place % 16 for place in places]), tuple(integers), tuple(constants.values()), warps,
            stages,
        )  # fmt: skip
        compiled = _compiled.get(key)
        if compiled is not None:
            compiled[*grid, 1](*places, *floats, *integers, *constants.values())
            return
    kernel = function[grid](*tensors, *floats, *integers, **constants, num_warps=warps, num_stages=stages)
    if key is not None and isinstance(kernel, CompiledKernel):
        if len(_compiled) >= COMPILED_LIMIT:
            _compiled.clear()
        _compiled[key] = kernel
