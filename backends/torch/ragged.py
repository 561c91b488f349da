"""Attention for a whole batch of sequences of different lengths: with numba on the CPU, with Triton on CUDA.

FlashAttention's variable lengths (``torch.nn.attention.varlen``) need keys packed one sequence after another:
for runs at arbitrary places, shared runs and listed rows, keys would have to be copied.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch

from backends import cpu_attention
from backends.cpu_attention import Array, Repeated, Stored
from backends.torch.convert import FROM_TORCH, translated
from backends.torch.ragged_work import Work, choose_tile, divide
from backends.torch.tensor import Placement, TorchTensor
from ml.base.checks import check_peers
from ml.dtypes import DType
from ml.errors import BoundsError, DTypeError, ShapeError
from ml.ragged import RaggedPlan

PROGRAMS = 2
"""Programs that a multiprocessor runs at once: see SHARED_BYTES of ragged_work.py."""
_KINDS = {dtype: cpu_attention.KINDS[dtype.name] for dtype in (DType.F32, DType.F16, DType.BF16)}
OLDEST = (8, 0)
"""The first compute capability whose tensor cores support BF16."""


def attend_ragged(
    ctx: Placement,
    query: TorchTensor,
    key: TorchTensor,
    value: TorchTensor,
    plan: RaggedPlan,
    scale: float,
    sinks: TorchTensor | None,
) -> TorchTensor | None:
    """See ``ml.SupportsRaggedAttention``. None if there are no kernels for the device."""
    check_peers("ragged_attention", ctx.backend, query, key, value, sinks)
    kernels = kernels_on(ctx.torch_device)
    if kernels is None:
        if ctx.torch_device.type != "cpu" or not query.dtype is key.dtype is value.dtype:
            return None
        keys, values = stored_of([key], key.dtype.name), stored_of([value], value.dtype.name)
        result = attend_on_cpu("ragged_attention", ctx, query, keys, values, plan, scale, sinks)
        if result is not None and not ctx.moves:
            plan.again = _Again(plan, query, key, value)
        return result
    q, k, v = query.native_on(ctx), key.native_on(ctx), value.native_on(ctx)
    logits = None if sinks is None else sinks.native_on(ctx)
    check_heads("ragged_attention", q, k, v)
    return launch("ragged_attention", ctx, kernels.attend, (q, k, v), v.shape, logits, scale, plan)


def check_heads(op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise ShapeError or DTypeError unless these are heads of one attention."""
    shapes = tuple(q.shape), tuple(k.shape), tuple(v.shape)
    if not q.dim() == k.dim() == v.dim() == 3 or shapes[1][:2] != shapes[2][:2]:
        raise ShapeError(f"{op}: query, key, value {shapes}; each must be (tokens, heads, size)")
    if shapes[0][2] != shapes[1][2] or not shapes[1][1] or shapes[0][1] % shapes[1][1]:
        raise ShapeError(
            f"{op}: query {shapes[0]}, key {shapes[1]}; one head size, heads a multiple of KV heads"
        )
    if not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point:
        raise DTypeError(f"{op}: query, key, value {q.dtype}, {k.dtype}, {v.dtype}; one float dtype")


def check_sinks(op: str, sinks: torch.Tensor, heads: int) -> None:
    if tuple(sinks.shape) != (heads,) or not sinks.dtype.is_floating_point:
        raise ShapeError(f"{op}: sinks {sinks.dtype} {tuple(sinks.shape)}; they must be floats ({heads},)")


def stored_of(parts: Sequence[TorchTensor], kind: str) -> Stored | None:
    """K or V on the CPU as arguments of its kernels: numbers, or codes and scales; None if unsupported."""
    for part in parts:
        if not part.native.is_cpu:
            return None
    return cpu_attention.stored_of(parts, kind, array_of)


def array_of(native: torch.Tensor) -> Array:
    """A CPU tensor as an Array."""
    size = native.element_size()
    return Array(native.data_ptr(), tuple(native.size()), [step * size for step in native.stride()], size)


class _Again(Repeated):
    __slots__ = ()

    def __call__(
        self, ctx: Placement, query: TorchTensor, key: TorchTensor, value: TorchTensor, scale: float
    ) -> TorchTensor | None:
        stored = self.operands(ctx, query, key, value)
        if stored is None:
            return None
        q = query.native
        if not q.is_cpu or q.stride(2) != 1:
            return None
        try:
            asked, out = _asked(self.kind, q), _result(q, self.v_dim)
            self.run(asked, stored, scale, torch.get_num_threads(), out.data_ptr())
            return TorchTensor.own(ctx, out if q.dtype is torch.float32 else out.to(q.dtype), query.dtype)
        except (RuntimeError, MemoryError) as error:
            raise translated("ragged_attention", error, "cpu") from error


def attend_on_cpu(
    op: str, ctx: Placement, query: TorchTensor, key: Stored | None, value: Stored | None, plan: RaggedPlan,
    scale: float, sinks: TorchTensor | None,
) -> TorchTensor | None:  # fmt: skip
    """Attention with torch's number of threads; None without kernels, and for unsupported operands."""
    q, kind = query.native_on(ctx), _KINDS.get(query.dtype)
    if key is None or value is None or kind is None or not plan.tokens or cpu_attention.kernels() is None:
        return None
    if q.dim() != 3:
        return None
    if q.stride(2) != 1:
        q = q.contiguous()
    launch = cpu_attention.launch_of(op, plan, query.shape, key.shape, value.shape)
    logits = None if sinks is None else sinks.native_on(ctx).detach().float().contiguous().numpy()
    out, threads = _result(q, launch.v_dim), torch.get_num_threads()
    launch.run(_asked(kind, q), key.arguments, value.arguments, scale, logits, threads, out.data_ptr())
    return TorchTensor.own(ctx, out if q.dtype is torch.float32 else out.to(q.dtype), query.dtype)


def _asked(kind: int, q: torch.Tensor) -> tuple[int, int, int, int]:
    size, steps = q.element_size(), q.stride()
    return kind, q.data_ptr(), steps[0] * size, steps[1] * size


def _result(q: torch.Tensor, v_dim: int) -> torch.Tensor:
    if q.dtype is torch.float32 and v_dim == q.size(2) and q.is_contiguous():
        return torch.empty_like(q)  # the other takes longer
    return torch.empty((*q.shape[:2], v_dim), dtype=torch.float32)


def launch(
    op: str, ctx: Placement, attend: Callable[..., torch.Tensor], tensors: tuple[torch.Tensor, ...],
    values: Sequence[int], logits: torch.Tensor | None, scale: float, plan: RaggedPlan,
) -> TorchTensor:  # fmt: skip
    """Call ``attend`` with query, key and value by the plan, after checking them; ``values`` is the shape of
    V.
    """
    q, k, _ = tensors
    if logits is not None:
        check_sinks(op, logits, q.shape[1])
    if q.shape[0] != plan.tokens:
        raise ShapeError(f"{op}: {q.shape[0]} queries; the plan is for {plan.tokens}")
    dtype = FROM_TORCH[q.dtype]
    if 0 in (q.numel(), *values):
        return TorchTensor.own(ctx, q.new_zeros((*q.shape[:2], values[2])), dtype)
    work, packed = work_of(ctx, q, values, plan, PROGRAMS * _multiprocessors(q.device))
    if work.reach > k.shape[0]:
        raise BoundsError(f"{op}: the plan refers to row {work.reach - 1} of {k.shape[0]}")
    return TorchTensor.own(ctx, attend(*tensors, logits, scale, work, packed), dtype)


def work_of(
    ctx: Placement, q: torch.Tensor, values: Sequence[int], plan: RaggedPlan, programs: int
) -> tuple[Work, torch.Tensor]:
    """The plan divided for tensors like these, on their device; uploaded once for all similar layers."""
    heads, head_dim = q.shape[1:]
    _, kv_heads, v_dim = values
    kind = f"torch {q.device} {heads} {kv_heads} {head_dim} {v_dim} {q.element_size()} {programs}"
    sizes = kv_heads, heads // kv_heads, head_dim, v_dim, q.element_size()
    work, on = plan.lay(kind, functools.partial(_pack, sizes, programs))
    packed: Any = on(cast("Any", ctx))
    return work, packed.native


def _pack(sizes: tuple[int, ...], programs: int, plan: RaggedPlan) -> tuple[Work, np.ndarray]:
    kv_heads, group, head_dim, v_dim, itemsize = sizes
    tile = choose_tile(plan, group, head_dim, v_dim, itemsize)
    work = divide(plan, tile, programs, kv_heads * -(-group // tile.heads))
    return work, work.packed


@functools.lru_cache(maxsize=16)
def kernels_on(device: torch.device) -> ModuleType | None:
    """The kernels, if triton is installed and the device is a CUDA device; not tested on ROCm."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    if torch.cuda.get_device_capability(device) < OLDEST:
        return None
    try:
        return importlib.import_module("backends.torch.triton_ragged")
    except ImportError:
        return None


@functools.lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
