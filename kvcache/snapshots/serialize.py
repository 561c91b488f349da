"""Snapshots in host memory: the arrays of a snapshot and what they are, and back.

It is what goes to host memory, to disk or over a wire (see kvcache.stores). It names no backend and no
layout: what is written on one backend is restored on any other that has its dtypes. Arrays keep the order
of axes in which the cache stores them, so that they are put back by plain copies; ``axes`` says which
(0 cells, 1 heads, 2 dims, from the outermost in).
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
from ml.transfer import page_out

__all__ = ["begin_serialize", "deserialize", "serialize", "serialized_nbytes"]

Meta = Mapping[str, Any]
_TO_COME = np.empty(0, np.uint8)


def serialize(backend: ml.Backend, snapshot: Snapshot) -> SerializedSnapshot:
    """Copy a snapshot of a cache on ``backend`` to host memory, byte for byte; it stays as it is."""
    begun = _copied(backend, snapshot, functools.partial(page_out, backend))
    assert begun is not None
    begun[1].wait()
    return begun[0]


def begin_serialize(
    backend: ml.SupportsTransfers, snapshot: Snapshot
) -> tuple[SerializedSnapshot, ml.PageTransfer] | None:
    """As ``serialize``; the arrays are good when the transfer is done. None where the backend copies at once.

    What the snapshot has copied out of the cache is to be kept until then.
    """
    return _copied(cast("ml.Backend", backend), snapshot, backend.page_out)


Copies = tuple[list[np.ndarray], ml.PageTransfer]


def _copied(
    backend: ml.Backend,
    snapshot: Snapshot,
    copy: Callable[[ml.Context, Sequence[ml.Tensor]], Copies | None],
) -> tuple[SerializedSnapshot, ml.PageTransfer] | None:
    with backend.new_context() as ctx:
        writer = _Writer(ctx)
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
    """A snapshot over these arrays, for a cache on ``backend``; SnapshotCorruptError for what is none.

    Where the backend lives in host memory the arrays are used in place: leave them as they are.
    """
    check_serialized("deserialize", serialized)
    with backend.new_context() as ctx:
        return _Reader(ctx, backend, serialized.arrays).decode(serialized.meta["snapshot"])


class _Writer:
    def __init__(self, ctx: ml.Context) -> None:
        self.ctx = ctx
        self.arrays: dict[str, np.ndarray] = {}
        """All in their order; those of ``tensors`` are still to come."""
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
            for i, layer in snapshot.read().items()
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
        """On the device of ``ctx``. ``borrow``: the cache copies it on.

        A state or an encoder's output stays in use, and is copied.
        """
        name, axes = entry
        array = self.arrays[name]
        if borrow and self.borrow is not None:
            stored = self.borrow(ctx, array)
        else:
            stored = ctx.from_numpy(array, ml.DType.from_numpy(array.dtype))
        return stored.permute(ctx, *(axes.index(axis) for axis in range(array.ndim)))


def _axes(tensor: ml.Tensor) -> list[int]:
    """The axes from the outermost in memory on; those of size 1, which lie nowhere, stay in their place."""
    shape, strides = tensor.shape, tensor.strides
    if not all(shape):
        return [*range(len(shape))]
    wide = iter(sorted((a for a, size in enumerate(shape) if size > 1), key=lambda axis: -strides[axis]))
    return [next(wide) if size > 1 else axis for axis, size in enumerate(shape)]
