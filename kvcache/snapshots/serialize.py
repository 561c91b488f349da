"""Serialized snapshots: the arrays of a snapshot in host memory, with a description of them, and back.

This is the form that goes to host memory, to disk or over the network (see kvcache.stores). It is independent
of the backend and the layout: a snapshot written on one backend can be restored on any other that has its
dtypes. Arrays keep the axis order in which the cache stores them, so that restoring is a plain copy; ``axes``
records it (0 cells, 1 heads, 2 dims, outermost first).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

import ml
from kvcache.snapshots.check_serialized import check_serialized
from kvcache.snapshots.layer_shapes import described, shapes_of
from kvcache.snapshots.snapshot import (
    AttentionSnapshot,
    EncoderSnapshot,
    LayerSnapshot,
    Snapshot,
    StateSnapshot,
    WrapperSnapshot,
)
from kvcache.storage.formats import CacheFormat
from kvcache.stores.serialized_snapshot import SerializedSnapshot
from ml.transfer import in_host_memory, page_out

__all__ = ["begin_serialize", "deserialize", "serialize", "serialized_nbytes"]

Meta = Mapping[str, Any]
_TO_COME = np.empty(0, np.uint8)


def serialize(backend: ml.Backend, snapshot: Snapshot) -> SerializedSnapshot:
    """Copy a snapshot of a cache on ``backend`` to host memory, byte for byte; the snapshot is not
    changed.

    >>> import ml
    >>> from kvcache import Batch, CausalCache, deserialize, serialize
    >>> cache = CausalCache()
    >>> with ml.open_backend("numpy") as backend, backend.new_context() as ctx:
    ...     cache.init(backend, ml.DType.F32, max_sequences=2, capacity=16, max_batch=4)
    ...     cache.start_forward(ctx, Batch([0, 1, 2], [0, 0, 0]))
    ...     cache.put(ctx, ctx.zeros((3, 1, 4), ml.DType.F32), ctx.zeros((3, 1, 4), ml.DType.F32))
    ...     stored = serialize(backend, cache.snapshot(0))       # to host memory: pack() gives its bytes
    ...     restored = cache.restore(1, deserialize(backend, stored))
    ...     print(stored.meta["snapshot"]["kind"], restored, cache.offset(1))
    ...     cache.close()
    attention True 3
    """
    begun = _copied(backend, snapshot, functools.partial(page_out, backend), in_host_memory(backend))
    assert begun is not None
    begun[1].wait()
    return begun[0]


def begin_serialize(
    backend: ml.SupportsTransfers, snapshot: Snapshot
) -> tuple[SerializedSnapshot, ml.PageTransfer] | None:
    """As ``serialize``, but the arrays are valid only when the transfer has finished. None if the backend
    copies synchronously.

    Keep the snapshot's copied-out tensors until then.
    """
    return _copied(cast("ml.Backend", backend), snapshot, backend.page_out)


Copies = tuple[list[np.ndarray], ml.PageTransfer]


def _copied(
    backend: ml.Backend,
    snapshot: Snapshot,
    copy: Callable[[ml.Context, Sequence[ml.Tensor]], Copies | None],
    views: bool = False,
) -> tuple[SerializedSnapshot, ml.PageTransfer] | None:
    """``views``: what lies in the cache is copied from there, without another copy first."""
    with backend.new_context() as ctx:
        writer = _Writer(ctx, views)
        meta = writer.encode(snapshot)
        begun = copy(ctx, [*writer.tensors.values()])
    if begun is None:
        return None
    writer.arrays.update(zip(writer.tensors, begun[0], strict=True))
    return SerializedSnapshot({"snapshot": meta}, writer.arrays), begun[1]


def serialized_nbytes(snapshot: Snapshot) -> int:
    """``serialize(backend, snapshot).nbytes``, before anything is copied."""
    if isinstance(snapshot, WrapperSnapshot):
        return sum(serialized_nbytes(part) for part in snapshot.parts)
    positions = snapshot.positions.size if isinstance(snapshot, AttentionSnapshot) else 0
    return snapshot.nbytes + np.dtype(np.int64).itemsize * positions


def deserialize(backend: ml.Backend, serialized: SerializedSnapshot) -> Snapshot:
    """A snapshot with the content of these arrays, for a cache on ``backend``.

    A backend in host memory uses the arrays in place, so do not change them afterwards. Raises
    SnapshotCorruptError if ``serialized`` is invalid.
    """
    check_serialized("deserialize", serialized)
    with backend.new_context() as ctx:
        return _Reader(ctx, backend, serialized.arrays).decode(serialized.meta["snapshot"])


class _Writer:
    def __init__(self, ctx: ml.Context, views: bool) -> None:
        self.ctx, self.views = ctx, views
        self.arrays: dict[str, np.ndarray] = {}
        """All arrays in order; those of ``tensors`` are still to be copied."""
        self.tensors: dict[str, ml.Tensor] = {}

    def encode(self, snapshot: Snapshot, at: str = "") -> dict[str, Any]:
        meta: dict[str, Any] = {"begin": int(snapshot.begin), "end": int(snapshot.end)}
        if isinstance(snapshot, AttentionSnapshot):
            return {"kind": "attention", **meta, **self._attention(snapshot, at)}
        if isinstance(snapshot, StateSnapshot):
            states = [
                [kind, layer, self._tensor(f"{at}{kind}.{layer}", tensor)]
                for (kind, layer), tensor in snapshot.state.read(self.ctx).items()
            ]
            return {"kind": "states", **meta, "states": states}
        if isinstance(snapshot, EncoderSnapshot):
            layers = [
                [i, [self._tensor(f"{at}{i}.{n}", tensor) for n, tensor in enumerate(pair)]]
                for i, pair in snapshot.layers.items()
            ]
            own = {"position": snapshot.position, "length": snapshot.length, "layers": layers}
            return {"kind": "encoder", **meta, **own}
        if isinstance(snapshot, WrapperSnapshot):
            parts = [self.encode(part, f"{at}{i}/") for i, part in enumerate(snapshot.parts)]
            return {"kind": "wrapper", **meta, "parts": parts}
        raise ml.NotSupportedError(f"serialize: a snapshot of {type(snapshot).__name__}")

    def _attention(self, snapshot: AttentionSnapshot, at: str) -> dict[str, Any]:
        self.arrays[f"{at}positions"] = np.array(snapshot.positions, dtype=np.int64)
        layers = [
            [
                i,
                layer.activations.name,
                [self._tensor(f"{at}{i}.{n}", t) for n, t in enumerate(layer.tensors)],
            ]
            for i, layer in snapshot.read(self.views).items()
        ]
        shapes = snapshot.shapes() if layers else {}
        kept = {"keep": snapshot.keep} if snapshot.keep else {}
        whole = {"whole": snapshot.whole, **kept}
        return {"dtype": snapshot.dtype.name, **whole, "layers": layers, **described(shapes)}

    def _tensor(self, name: str, tensor: ml.Tensor) -> list[Any]:
        """[name, axes]"""
        axes = _axes(tensor)
        self.arrays[name] = _TO_COME
        self.tensors[name] = tensor.permute(self.ctx, *axes)
        return [name, axes]


class _Reader:
    def __init__(self, ctx: ml.Context, backend: ml.Backend, arrays: Mapping[str, np.ndarray]) -> None:
        self.ctx, self.arrays = ctx, arrays
        self.borrow = backend.borrow if isinstance(backend, ml.SupportsHostMemory) else None

    def decode(self, meta: Meta, at: str = "") -> Snapshot:
        kind, begin, end = meta["kind"], meta["begin"], meta["end"]
        if kind == "states":
            states = {
                (name, layer): self._tensor(self.ctx.layer(layer), tensor)
                for name, layer, tensor in meta["states"]
            }
            return StateSnapshot(begin, end, states)
        if kind == "encoder":
            pairs = {i: self._pair(self.ctx.layer(i), tensors) for i, tensors in meta["layers"]}
            return EncoderSnapshot(begin, end, meta["position"], meta["length"], pairs)
        if kind == "wrapper":
            parts = tuple(self.decode(part, f"{at}{i}/") for i, part in enumerate(meta["parts"]))
            return WrapperSnapshot(begin, end, parts)
        return self._attention(meta, at)

    def _attention(self, meta: Meta, at: str) -> AttentionSnapshot:
        layers, shapes = {}, shapes_of(meta, self.arrays)
        for i, activations, tensors in meta["layers"]:
            place = self.ctx.layer(i)
            parts = tuple(self._tensor(place, tensor, borrow=True) for tensor in tensors)
            layers[i] = LayerSnapshot(parts, ml.DType[activations], shapes[i])
        span, positions = (meta["begin"], meta["end"]), self.arrays[f"{at}positions"]
        keep = meta.get("keep", 0) if meta["whole"] else None
        return AttentionSnapshot(*span, positions, CacheFormat.of(meta["dtype"]), keep, layers)

    def _pair(self, ctx: ml.Context, tensors: Sequence[Any]) -> tuple[ml.Tensor, ml.Tensor]:
        key, value = tensors
        return self._tensor(ctx, key), self._tensor(ctx, value)

    def _tensor(self, ctx: ml.Context, entry: Sequence[Any], borrow: bool = False) -> ml.Tensor:
        """The tensor on the device of ``ctx``. ``borrow``: it may alias the array, as the cache copies it
        further.

        A state or an encoder's output stays in use, and is always copied.
        """
        name, axes = entry
        array = self.arrays[name]
        if borrow and self.borrow is not None:
            stored = self.borrow(ctx, array)
        else:
            stored = ctx.from_numpy(array, ml.DType.from_numpy(array.dtype))
        return stored.permute(ctx, *(axes.index(axis) for axis in range(array.ndim)))


def _axes(tensor: ml.Tensor) -> list[int]:
    """The axes, outermost in memory first; axes of size 1 keep their place."""
    shape, strides = tensor.shape, tensor.strides
    if not all(shape):
        return [*range(len(shape))]
    wide = iter(sorted((a for a, size in enumerate(shape) if size > 1), key=lambda axis: -strides[axis]))
    return [next(wide) if size > 1 else axis for axis, size in enumerate(shape)]
