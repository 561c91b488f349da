"""The layers of a cache or a serialized snapshot and their shapes: a snapshot fits only its own model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import ml
from kvcache.snapshots.snapshot import AttentionSnapshot, WrapperSnapshot
from kvcache.storage.formats import CacheFormat
from kvcache.storage.layer_shape import LayerShape
from kvcache.stores.errors import SnapshotCorruptError
from kvcache.stores.serialized_snapshot import SerializedSnapshot

__all__ = [
    "Layers", "check_layers", "described", "layers_of_cache", "layers_of_serialized", "shapes_of",
]  # fmt: skip

Layers = Mapping[int, LayerShape]
"""The shape of each layer with attention over the model's own tokens."""


def layers_of_cache(cache: Any) -> Layers:
    """The layers that have been put or restored so far, of all caches of a wrapper."""
    return _of_snapshot(cache.snapshot(0, 0, 0))


def layers_of_serialized(serialized: SerializedSnapshot) -> Layers:
    """The layers that a checked serialized snapshot has data of."""
    return _of_meta(serialized, serialized.meta["snapshot"])


def check_layers(serialized: SerializedSnapshot, expected: Layers) -> None:
    """Raise SnapshotCorruptError unless a checked snapshot has exactly these layers and widths; {}: any."""
    stored = layers_of_serialized(serialized)
    positions = (array.size for name, array in serialized.arrays.items() if name.endswith("positions"))
    if not expected or not (stored or any(positions)):
        return
    lacking, strange = expected.keys() - stored.keys(), stored.keys() - expected.keys()
    if lacking or strange:
        raise SnapshotCorruptError(
            f"serialized snapshot: it has the layers {sorted(stored)}; the cache stores {sorted(expected)}"
        )
    for i, shape in expected.items():
        if stored[i] != shape:
            raise SnapshotCorruptError(f"snapshot: layer {i} has {stored[i]}; the cache stores {shape}")


def _of_snapshot(snapshot: object) -> Layers:
    if isinstance(snapshot, AttentionSnapshot):
        return snapshot.shapes()
    parts = snapshot.parts if isinstance(snapshot, WrapperSnapshot) else ()
    return {i: shape for part in parts for i, shape in _of_snapshot(part).items()}


def _of_meta(serialized: SerializedSnapshot, meta: Mapping[str, Any]) -> Layers:
    kind = meta["kind"]
    if kind == "attention":
        return shapes_of(meta, serialized.arrays)
    parts = meta["parts"] if kind == "wrapper" else ()
    return {i: shape for part in parts for i, shape in _of_meta(serialized, part).items()}


def shapes_of(meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> dict[int, LayerShape]:
    """The layers of a checked serialized snapshot of attention."""
    stored, latent, extra = CacheFormat.of(meta["dtype"]), dict(meta.get("latent", ())), meta.get("extra", ())
    named = {i: [(name, tuple(shape)) for name, shape in specs] for i, specs in extra}
    return {
        i: LayerShape.of_parts(
            stored, ml.DType[activations], [_part(arrays[name], axes) for name, axes in tensors],
            latent.get(i), named.get(i, ()),
        )
        for i, activations, tensors in meta["layers"]
    }  # fmt: skip


def described(shapes: Layers) -> dict[str, Any]:
    """Metadata of latent layers and extras in the form that ``shapes_of`` reads; {} if there are none."""
    latent = [[i, shape.value[1]] for i, shape in shapes.items() if shape.is_latent]
    extra = [
        [i, [[one.name, [*one.shape]] for one in shape.extra]] for i, shape in shapes.items() if shape.extra
    ]
    return {**({"latent": latent} if latent else {}), **({"extra": extra} if extra else {})}


def _part(array: np.ndarray, axes: Sequence[int]) -> tuple[tuple[int, ...], ml.DType]:
    """An array's shape as (count, heads, ...), and its dtype."""
    return tuple(array.shape[axes.index(i)] for i in range(array.ndim)), ml.DType.from_numpy(array.dtype)
