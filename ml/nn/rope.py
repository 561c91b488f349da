"""Rotary position embeddings (Su et al., "RoFormer", 2021, arXiv 2104.09864).

A token at position p turns pair i of a head's dimensions by the angle ``p * frequency[i]``::

    half-split (Llama, Qwen):   pair i is (x[i], x[i + dim/2])
    interleaved (GPT-J, Cohere): pair i is (x[2i], x[2i + 1])

Computed as ``x * cos + swapped(x) * sin``, where ``swapped`` exchanges the two elements of each pair and the
sine for the first of each pair is negated. The sign is put into the frequencies, since cos(-a) = cos(a) and
sin(-a) = -sin(a): both tables are then one elementwise function of the angles, whatever the pairing.
Dimensions beyond ``dim`` are unchanged (partial rotary).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeGuard, cast

import numpy as np

from ml.capabilities import SupportsRope
from ml.dtypes import DType
from ml.errors import DTypeError, ShapeError
from ml.nn.attention import offers
from ml.nn.rope_spec import RopeSpec
from ml.protocols import Context, Tensor

Positions = Sequence[int] | np.ndarray | Tensor
"""One position per token, on the host or as an I32 tensor of one axis."""


def rope(ctx: Context, x: Tensor, positions: Positions, spec: RopeSpec) -> Tensor:
    """Rotate x (tokens, heads, head_dim) by its positions; computed in F32, rounded once to x's dtype.

    Use ``Rotation`` for several tensors at the same positions, such as the layers of one pass.
    """
    return Rotation(ctx, positions, spec).apply(ctx, x)


def rope_tables(ctx: Context, positions: Positions, spec: RopeSpec) -> tuple[Tensor, Tensor]:
    """cos and sin, F32 (tokens, 1, dim), times the attention factor; usable in all layers of a pass."""
    return _tables(ctx, positions, spec, spec.attention_factor)


def multi_axis_tables(
    ctx: Context, positions: np.ndarray | Tensor, axes: Sequence[int], spec: RopeSpec
) -> tuple[Tensor, Tensor]:
    """Tables for ``apply_rope`` in which each pair of dimensions is rotated by its own kind of position.

    Multimodal rotary embedding (M-RoPE; Wang et al., "Qwen2-VL", 2024, arXiv 2409.12191): ``positions``
    (kinds, tokens) has time, height and width of each token, as host integers or an I32 tensor, and pair i is
    rotated by kind ``axes[i]``. Qwen2-VL's ``mrope_section`` [16, 24, 24] is ``[0] * 16 + [1] * 24 + [2] *
    24``. With equal rows, the result is that of ``rope_tables``. Returns cos and sin, F32 (tokens, 1, dim),
    times the attention factor.

    Raises ShapeError unless ``axes`` has a row of ``positions`` for each pair; DTypeError for positions that
    are not integers.
    """
    shape = tuple(positions.shape)
    if len(shape) != 2 or len(axes) != spec.dim // 2 or not all(0 <= axis < shape[0] for axis in axes):
        raise ShapeError(
            f"multi_axis_tables: positions {shape} for axes {list(axes)}; positions must be (kinds, tokens), "
            f"and axes must name one of the kinds for each of {spec.dim // 2} pairs"
        )
    each = np.repeat(axes, 2) if spec.interleaved else np.tile(axes, 2)
    if isinstance(positions, np.ndarray):
        if positions.dtype.kind not in "iu":
            raise DTypeError(f"multi_axis_tables: positions {positions.dtype}; they must be integers")
        positions = ctx.from_numpy(positions.astype(np.int32), DType.I32)
    elif positions.dtype is not DType.I32:
        raise DTypeError(f"multi_axis_tables: positions {positions.dtype!r}; they must be I32")
    steps = positions.rows(ctx, each).permute(ctx, 1, 0).cast(ctx, DType.F32)
    angles = steps.contiguous(ctx).reshape(ctx, shape[1], 1, spec.dim)
    return _cos_sin(ctx, angles.mul(ctx, ctx.from_numpy(spec.signed_frequencies)), spec.attention_factor)


def apply_rope(ctx: Context, x: Tensor, cos: Tensor, sin: Tensor, spec: RopeSpec) -> Tensor:
    """Rotate x (tokens, heads, head_dim) by tables of ``rope_tables``; returns x's dtype."""
    dim = spec.dim
    _check_vectors("apply_rope", x, cos.shape[0], spec)
    partial = dim < x.shape[2]
    turned = x.slice(ctx, 2, 0, dim) if partial else x
    if x.dtype is not DType.F32:
        turned = turned.cast(ctx, DType.F32)
    turned = turned.mul(ctx, cos).add(ctx, _swapped(ctx, turned, spec).mul(ctx, sin))
    if x.dtype is not DType.F32:
        turned = turned.cast(ctx, x.dtype)
    return turned.concat(ctx, x.slice(ctx, 2, dim, x.shape[2]), 2) if partial else turned


def rope_shift(spec: RopeSpec, begin: int = 0) -> Callable[[Context, int, Tensor, Tensor], Tensor]:
    """The cache's shift function for keys rotated by ``spec``, in their dimensions from ``begin`` on.

    Dimensions before ``begin`` do not depend on the position, such as latents, which are followed by their
    rotated numbers. Rotations add up, so a stored key moves from position p to p + offset by one more
    rotation. That rotation does not change lengths: the key already contains the attention factor.
    """

    def shift(ctx: Context, layer: int, key: Tensor, offsets: Tensor) -> Tensor:
        """key (cells, kv_heads, head_dim), offsets I32 (cells,) -> key at its new positions."""
        tables = _tables(ctx, offsets, spec, 1.0)
        if not begin:
            return apply_rope(ctx, key, *tables, spec)
        fixed, turned = key.slice(ctx, 2, 0, begin), key.slice(ctx, 2, begin, key.shape[2])
        return fixed.concat(ctx, apply_rope(ctx, turned, *tables, spec), 2)

    return shift


class Rotation:
    """The rotation of one forward pass: the backend's fused kernel, or tables that are computed once.

    Its tensors are on the device of the context that created it; ``to`` copies them to another.

    >>> import ml, ml.nn
    >>> with ml.open_backend("numpy") as backend, backend.new_context() as ctx:
    ...     rotation = ml.nn.Rotation(ctx, [0, 1], ml.nn.RopeSpec(dim=4))
    ...     rotation.apply(ctx, ctx.full((2, 1, 4), 1.0, ml.DType.F32)).shape
    (2, 1, 4)
    """

    __slots__ = ("_fused", "_positions", "_tables", "spec")

    def __init__(
        self,
        ctx: Context,
        positions: Positions,
        spec: RopeSpec,
        fused: Tensor | None = None,
        tables: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """``fused`` (positions) and ``tables``, if they already exist on the device of ``ctx``."""
        self.spec = spec
        self._positions = positions
        self._fused, self._tables = fused, tables
        backend = getattr(ctx, "backend", None)  # a context need not expose its backend
        if fused is None and tables is None and offers(backend, SupportsRope):
            self._fused = _on_device(ctx, positions)

    def apply(self, ctx: Context, x: Tensor) -> Tensor:
        """Rotate x (tokens, heads, head_dim)."""
        if self._fused is not None:
            _check_vectors("rope", x, self._fused.shape[0], self.spec)
            kernel: SupportsRope = ctx.backend  # type: ignore[assignment]  # found in __init__
            rotated = kernel.rope(ctx, x, self._fused, self.spec)
            if rotated is not None:
                return rotated
            self._fused = None  # spec not supported: use the generic implementation for the rest of the pass
        if self._tables is None:
            self._tables = rope_tables(ctx, self._positions, self.spec)
        return apply_rope(ctx, x, *self._tables, self.spec)

    def to(self, ctx: Context) -> Rotation:
        """The same rotation with its tensors on the device of ``ctx``."""
        fused = None if self._fused is None else self._fused.cast(ctx, DType.I32)
        tables = self._tables
        if tables is not None:
            tables = tables[0].cast(ctx, DType.F32), tables[1].cast(ctx, DType.F32)
        return Rotation(ctx, self._positions, self.spec, fused, tables)


def _is_host(positions: Positions) -> TypeGuard[Sequence[int] | np.ndarray]:
    return isinstance(positions, (np.ndarray, Sequence))


def _on_device(ctx: Context, positions: Positions) -> Tensor:
    """Positions as an I32 tensor (tokens,)."""
    if _is_host(positions):
        return ctx.from_numpy(_on_host(positions), DType.I32)
    tensor = cast("Tensor", positions)
    if tensor.dtype is not DType.I32 or len(tensor.shape) != 1:
        raise DTypeError(f"rope: positions {tensor.dtype!r} {tensor.shape}; they must be I32 with one axis")
    return tensor


def _on_host(positions: Sequence[int] | np.ndarray) -> np.ndarray:
    host = np.asarray(positions)
    if host.ndim != 1 or (host.size and host.dtype.kind not in "iu"):
        raise ShapeError(f"rope: positions {host.dtype} {host.shape}; they must be integers with one axis")
    return host


def _tables(ctx: Context, positions: Positions, spec: RopeSpec, factor: float) -> tuple[Tensor, Tensor]:
    """cos and sin of position * frequency, in F32 as the reference models compute them."""
    if not _is_host(positions):
        steps = _on_device(ctx, positions).cast(ctx, DType.F32).reshape(ctx, -1, 1, 1)
        return _cos_sin(ctx, steps.mul(ctx, ctx.from_numpy(spec.signed_frequencies)), factor)
    angles_on_host = _on_host(positions).astype(np.float32)[:, None, None] * spec.signed_frequencies
    shape = angles_on_host.shape
    tables = np.empty((2, *shape), np.float32)  # one transfer for both
    np.cos(angles_on_host, out=tables[0])
    np.sin(angles_on_host, out=tables[1])
    if factor != 1.0:
        tables *= np.float32(factor)
    both = ctx.from_numpy(tables)
    return both.view(ctx, 0, shape), both.view(ctx, angles_on_host.size, shape)


def _cos_sin(ctx: Context, angles: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    cos, sin = angles.cos(ctx), angles.sin(ctx)
    return (cos, sin) if factor == 1.0 else (cos.scale(ctx, factor), sin.scale(ctx, factor))


def _swapped(ctx: Context, x: Tensor, spec: RopeSpec) -> Tensor:
    """x (tokens, heads, dim) with the two elements of each pair exchanged."""
    if not spec.interleaved:
        half = spec.dim // 2
        return x.slice(ctx, 2, half, spec.dim).concat(ctx, x.slice(ctx, 2, 0, half), 2)
    pairs = x.reshape(ctx, *x.shape[:2], spec.dim // 2, 2)
    swapped = pairs.slice(ctx, 3, 1, 2).concat(ctx, pairs.slice(ctx, 3, 0, 1), 3)
    return swapped.reshape(ctx, *x.shape)


def _check_vectors(op: str, x: Tensor, tokens: int, spec: RopeSpec) -> None:
    shape = x.shape
    if len(shape) != 3 or shape[0] != tokens or shape[2] < spec.dim:
        raise ShapeError(
            f"{op}: x {shape} for {tokens} positions; it must be ({tokens}, heads, head_dim >= {spec.dim})"
        )
    if not x.dtype.is_float:
        raise DTypeError(f"{op}: takes F32, F16 or BF16, not {x.dtype!r}")
