"""Which layers a cache or a serialized snapshot has, and how wide: it is good for its own model only.

A layer's **widths** are (heads, dim) of its keys and of its values, as the model puts them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml
from kvcache.formats import CacheFormat
from kvcache.snapshots.snapshot import AttentionSnapshot, RecurrentSnapshot, WrapperSnapshot
from kvcache.stores.errors import SnapshotCorrupt
from kvcache.stores.serialized_snapshot import SerializedSnapshot

__all__ = ["Layers", "check_layers", "layers_of_cache", "layers_of_serialized"]

Layers = Mapping[int, tuple[tuple[int, int], tuple[int, int]]]
"""By layer the widths of keys and values: those of attention over what the model itself has written."""


def layers_of_cache(cache: Any) -> Layers:
    """The layers that were put so far, or restored; of all caches of a wrapper."""
    return _of_snapshot(cache.snapshot(0, 0, 0))


def layers_of_serialized(serialized: SerializedSnapshot) -> Layers:
    """Those that a serialized snapshot, which was checked, has something of."""
    return _of_meta(serialized, serialized.meta["snapshot"])


def check_layers(serialized: SerializedSnapshot, expected: Layers) -> None:
    """Raise SnapshotCorrupt unless what was checked has exactly these layers, as wide; {}: any."""
    found = layers_of_serialized(serialized)
    if not expected or not (found or _has_positions(serialized)):
        return
    lacking, strange = expected.keys() - found.keys(), found.keys() - expected.keys()
    if lacking or strange:
        raise SnapshotCorrupt(
            f"serialized snapshot: it has the layers {sorted(found)}; the cache stores {sorted(expected)}"
        )
    for i, widths in expected.items():
        if found[i] != widths:
            raise SnapshotCorrupt(
                f"serialized snapshot: layer {i} is {found[i]} (heads, dim); the cache stores {widths}"
            )


def _has_positions(serialized: SerializedSnapshot) -> bool:
    """Whether attention layers have something in it."""
    return any(array.size for name, array in serialized.arrays.items() if name.endswith("positions"))


def _of_snapshot(snapshot: object) -> Layers:
    if isinstance(snapshot, AttentionSnapshot):
        return snapshot.shapes()
    if isinstance(snapshot, RecurrentSnapshot):
        return _of_snapshot(snapshot.attention)
    parts = snapshot.parts if isinstance(snapshot, WrapperSnapshot) else ()
    return {i: widths for part in parts for i, widths in _of_snapshot(part).items()}


def _of_meta(serialized: SerializedSnapshot, meta: Mapping[str, Any]) -> Layers:
    kind = meta["kind"]
    if kind == "attention":
        stored = CacheFormat.of(meta["dtype"])
        return {
            i: _widths(stored, ml.DType[activations], [_shape(serialized, *part) for part in parts])
            for i, activations, parts in meta["layers"]
        }
    if kind == "recurrent":
        return _of_meta(serialized, meta["attention"])
    parts = meta["parts"] if kind == "wrapper" else ()
    return {i: widths for part in parts for i, widths in _of_meta(serialized, part).items()}


def _shape(serialized: SerializedSnapshot, name: str, axes: Sequence[int]) -> tuple[int, ...]:
    """An array's shape as (count, heads, ...)."""
    shape = serialized.arrays[name].shape
    return tuple(shape[axes.index(i)] for i in range(len(shape)))


def _widths(
    stored: CacheFormat, activations: ml.DType, shapes: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """(heads, dim) of K and of V, whose parts have these shapes."""
    key, value = stored.dims([shape[2] for shape in shapes], activations)
    return (shapes[0][1], key), (shapes[-1][1], value)
