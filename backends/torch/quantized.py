"""Attention over codes and writing codes: with numba on the CPU; attention also with Triton on CUDA."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from backends.cpu_attention import BITS, check_shapes, values_shape
from backends.cpu_store import Codes, CodesStore, encoded, floats
from backends.torch import ragged
from backends.torch.tensor import Placement, TorchTensor
from ml.base import BaseBackend
from ml.base.checks import check_peers
from ml.dtypes import DType
from ml.ragged import RaggedPlan


def attend_quantized(
    ctx: Placement,
    query: TorchTensor,
    key: Sequence[TorchTensor],
    value: Sequence[TorchTensor],
    formats: tuple[str, str],
    plan: RaggedPlan,
    scale: float,
    sinks: TorchTensor | None,
) -> TorchTensor | None:
    """See ``ml.SupportsRaggedAttention``. On the CPU it uses torch's number of threads."""
    check_peers("ragged_attention", ctx.backend, query, *key, *value, sinks)
    if ctx.torch_device.type != "cpu":
        return attend_codes_on(ctx, query, key, value, formats, plan, scale, sinks)
    if not BITS.keys() >= set(formats):
        return None
    keys, values = (ragged.stored_of(parts, name) for parts, name in zip((key, value), formats, strict=True))
    return ragged.attend_on_cpu("ragged_attention", ctx, query, keys, values, plan, scale, sinks)


def attend_codes_on(
    ctx: Placement,
    query: TorchTensor,
    key: Sequence[TorchTensor],
    value: Sequence[TorchTensor],
    formats: tuple[str, str],
    plan: RaggedPlan,
    scale: float,
    sinks: TorchTensor | None,
) -> TorchTensor | None:
    """The same with the kernels of triton_ragged.py, with the roundings of decoded blocks."""
    kernels = ragged.kernels_on(ctx.torch_device)
    if kernels is None or not BITS.keys() >= set(formats):
        return None
    q, logits = query.native_on(ctx), None if sinks is None else sinks.native_on(ctx)
    parts = [[part.native_on(ctx) for part in stored] for stored in (key, value)]
    shapes = [
        values_shape(codes.shape, scales.shape, name)
        for (codes, scales), name in zip(parts, formats, strict=True)
    ]
    check_shapes("ragged_attention", q.shape, *shapes)
    attend = functools.partial(
        kernels.attend, scales=(parts[0][1], parts[1][1]), bits=(BITS[formats[0]], BITS[formats[1]])
    )
    tensors = q, parts[0][0], parts[1][0]
    return ragged.launch("ragged_attention", ctx, attend, tensors, shapes[1], logits, scale, plan)


def encode(ctx: Placement, x: TorchTensor, name: str) -> tuple[TorchTensor, ...] | None:
    """Codes and scales; None if the kernels do not support the case."""
    if name not in BITS or not x.native.is_cpu or ctx.torch_device.type != "cpu":
        return None
    parts = encoded(_host(x.native), name)
    if parts is None:
        return None
    return tuple(TorchTensor.own(ctx, torch.from_numpy(part), DType.from_numpy(part.dtype)) for part in parts)


def quantized_store(
    backend: BaseBackend,
    key: Sequence[TorchTensor],
    value: Sequence[TorchTensor],
    formats: tuple[str, str],
) -> CodesStore | None:
    """See ``ml.SupportsKVStorage``. Only on the CPU."""

    def host(tensor: Any) -> np.ndarray | None:
        if type(tensor) is not TorchTensor or tensor.backend is not backend or not tensor.dtype.is_float:
            return None
        return _host(tensor.native) if tensor.native.is_cpu else None

    return CodesStore.over(backend, host, codes_of(key, formats[0]), codes_of(value, formats[1]))


def codes_of(parts: Sequence[TorchTensor], name: str) -> Codes | None:
    """The codes in host memory; None for other devices or formats."""
    if name not in BITS or not all(part.native.is_cpu for part in parts):
        return None
    return Codes.of([part.native.numpy() for part in parts], name)


def _host(native: torch.Tensor) -> np.ndarray:
    """The tensor as F32, C-contiguous."""
    return floats(native.detach().to(torch.float32).numpy())
