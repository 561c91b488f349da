"""Cutting and joining serialized snapshots in host memory, without using a device.

Only divisible snapshots can be cut: attention over all of the past, encoder outputs, and wrappers of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from kvcache.stores.errors import SnapshotCorruptError
from kvcache.stores.serialized_snapshot import SerializedSnapshot

__all__ = ["cut_serialized", "join_serialized", "part_before"]

Meta = dict[str, Any]
Arrays = dict[str, np.ndarray]


def cut_serialized(
    serialized: SerializedSnapshot, at: int, own: bool = False
) -> tuple[SerializedSnapshot, SerializedSnapshot]:
    """The serialized snapshots of ``[begin, at)`` and ``[at, end)``, with ``at`` inside.

    Their arrays are views if possible. With ``own`` they have memory of their own, so that one half can be
    freed while the other is kept.

    Raises SnapshotCorruptError for an invalid or indivisible snapshot.
    """
    cut, first, second = _cut(
        "cut_serialized", serialized, at, np.ndarray.copy if own else np.ascontiguousarray
    )
    return SerializedSnapshot({"snapshot": first}, cut.first), SerializedSnapshot(
        {"snapshot": second}, cut.second
    )


def part_before(serialized: SerializedSnapshot, at: int) -> tuple[Meta, Arrays]:
    """The metadata of a serialized snapshot of ``[begin, at)``, and its arrays as views, which may have gaps.

    Raises SnapshotCorruptError as ``cut_serialized`` does.
    """
    cut, first, _ = _cut("part_before", serialized, at, np.asarray)
    return first, cut.first


def join_serialized(parts: Sequence[SerializedSnapshot]) -> SerializedSnapshot:
    """Join consecutive serialized snapshots; the result keeps the window or state of the last one.

    Raises SnapshotCorruptError for snapshots that cannot be joined.
    """
    try:
        join = _Join([part.arrays for part in parts])
        meta = join.meta([part.meta["snapshot"] for part in parts], "")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise SnapshotCorruptError(f"join_serialized: not parts of one snapshot ({error!r})") from error
    return SerializedSnapshot({"snapshot": meta}, join.joined)


def _cut(
    op: str, serialized: SerializedSnapshot, at: int, taken: Callable[[np.ndarray], np.ndarray]
) -> tuple[_Cut, Meta, Meta]:
    """``taken`` turns the view of half an array into an array."""
    try:
        cut = _Cut(serialized.arrays, at, taken)
        return cut, *cut.meta(serialized.meta["snapshot"], "")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise SnapshotCorruptError(
            f"{op}: at {at}: not a serialized snapshot that is divisible ({error!r})"
        ) from error


class _Cut:
    def __init__(
        self, arrays: Mapping[str, np.ndarray], at: int, taken: Callable[[np.ndarray], np.ndarray]
    ) -> None:
        self.arrays, self.at, self.taken = arrays, at, taken
        self.first: Arrays = {}
        self.second: Arrays = {}

    def meta(self, meta: Mapping[str, Any], name: str) -> tuple[Meta, Meta]:
        begin, end = meta["begin"], meta["end"]
        if not begin < self.at < end:
            raise ValueError(f"[{begin}, {end})")
        halves = {**meta, "end": self.at}, {**meta, "begin": self.at}
        if meta["kind"] == "attention" and not meta["whole"]:
            self._attention(meta, name, halves)
        elif meta["kind"] == "encoder":
            self._encoder(meta, halves)
        elif meta["kind"] == "wrapper":
            parts = [self.meta(part, f"{name}{i}/") for i, part in enumerate(meta["parts"])]
            halves[0]["parts"], halves[1]["parts"] = ([pair[half] for pair in parts] for half in (0, 1))
        else:
            raise ValueError(f"kind {meta['kind']!r}")
        return halves

    def _attention(self, meta: Mapping[str, Any], name: str, halves: tuple[Meta, Meta]) -> None:
        positions = self.arrays[f"{name}positions"]
        count = int(np.searchsorted(positions, self.at))
        for half, arrays, part in zip(
            halves, (self.first, self.second), (slice(0, count), slice(count, None)), strict=True
        ):
            arrays[f"{name}positions"] = positions[part].copy()
            if not positions[part].size:
                half["layers"] = []
                half.pop("latent", None)
                half.pop("extra", None)
                continue
            for _, _, tensors in meta["layers"]:
                for array, axes in tensors:
                    where = (*[slice(None)] * axes.index(0), part)
                    arrays[array] = self.taken(self.arrays[array][where])

    def _encoder(self, meta: Mapping[str, Any], halves: tuple[Meta, Meta]) -> None:
        """The output stays with the token that it came with."""
        position = meta["position"]
        if position is None:
            return
        in_first = position < self.at
        halves[in_first].update(position=None, length=0, layers=[])
        for _, tensors in meta["layers"]:
            for array, _ in tensors:
                (self.first if in_first else self.second)[array] = self.arrays[array]


class _Join:
    def __init__(self, arrays: Sequence[Mapping[str, np.ndarray]]) -> None:
        """``arrays`` of each part."""
        self.arrays = arrays
        self.joined: Arrays = {}

    def meta(self, metas: Sequence[Mapping[str, Any]], name: str) -> Meta:
        last, kind = metas[-1], metas[-1]["kind"]
        if any(meta["kind"] != kind for meta in metas):
            raise ValueError(f"kinds {[meta['kind'] for meta in metas]}")
        whole = {**last, "begin": metas[0]["begin"]}
        if kind == "attention" and not last["whole"]:
            return self._attention(metas, name)
        if kind == "wrapper":
            columns = zip(*(meta["parts"] for meta in metas), strict=True)
            return {**whole, "parts": [self.meta(column, f"{name}{i}/") for i, column in enumerate(columns)]}
        if kind == "states":
            self._take(-1, [tensor for _, _, tensor in last["states"]])
            return whole
        if kind == "encoder":  # the last output that came with a token
            at = max((i for i, meta in enumerate(metas) if meta["position"] is not None), default=-1)
            self._take(at, [tensor for _, tensors in metas[at]["layers"] for tensor in tensors])
            return {**metas[at], "begin": metas[0]["begin"], "end": last["end"]}
        self._take(
            -1, [[f"{name}positions"], *(tensor for *_, tensors in last["layers"] for tensor in tensors)]
        )
        return dict(last)

    def _take(self, part: int, tensors: Sequence[Sequence[Any]]) -> None:
        self.joined.update({array: self.arrays[part][array] for array, *_ in tensors})

    def _attention(self, metas: Sequence[Mapping[str, Any]], name: str) -> Meta:
        if any(one["end"] != other["begin"] for one, other in pairwise(metas)):
            raise ValueError(f"spans {[(meta['begin'], meta['end']) for meta in metas]}")
        stored = f"{name}positions"
        some = [i for i in range(len(metas)) if self.arrays[i][stored].size] or [0]
        first = metas[some[0]]
        if any(_without_axes(metas[i]) != _without_axes(first) for i in some):
            raise ValueError(f"{[_without_axes(metas[i]) for i in some]}")
        self.joined[stored] = np.concatenate([self.arrays[i][stored] for i in some])
        axes = [{array: own for *_, tensors in metas[i]["layers"] for array, own in tensors} for i in some]
        for array, order in axes[0].items():
            pieces = [
                self.arrays[i][array].transpose([own[array].index(axis) for axis in order])
                for i, own in zip(some, axes, strict=True)
            ]
            self.joined[array] = np.ascontiguousarray(np.concatenate(pieces, axis=order.index(0)))
        return {**first, "begin": metas[0]["begin"], "end": metas[-1]["end"]}


def _without_axes(meta: Mapping[str, Any]) -> Meta:
    """The metadata that all parts of one attention snapshot must share; the axes of a single token may be in
    any order.
    """
    layers = [[*layer, [array for array, _ in tensors]] for *layer, tensors in meta["layers"]]
    return {**meta, "begin": 0, "end": 0, "layers": layers}
