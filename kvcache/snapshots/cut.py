"""Serialized snapshots cut in two where they lie, in host memory: no device is asked.

Only what is divisible can be: attention over all of the past, encoders' outputs, wrappers of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kvcache.stores.errors import SnapshotCorruptError
from kvcache.stores.serialized_snapshot import SerializedSnapshot

__all__ = ["cut_serialized", "part_before"]

Meta = dict[str, Any]
Arrays = dict[str, np.ndarray]


def cut_serialized(
    serialized: SerializedSnapshot, at: int, own: bool = False
) -> tuple[SerializedSnapshot, SerializedSnapshot]:
    """The serialized snapshots of ``[begin, at)`` and ``[at, end)``, with ``at`` inside.

    Their arrays are views where that can be; with ``own`` they have memory of their own,
    so that one half is freed when it goes.

    Raises SnapshotCorruptError for what is no serialized snapshot, or one that cannot be cut.
    """
    cut, first, second = _cut(
        "cut_serialized", serialized, at, np.ndarray.copy if own else np.ascontiguousarray
    )
    return SerializedSnapshot({"snapshot": first}, cut.first), SerializedSnapshot(
        {"snapshot": second}, cut.second
    )


def part_before(serialized: SerializedSnapshot, at: int) -> tuple[Meta, Arrays]:
    """What a serialized snapshot of ``[begin, at)`` would say, and its arrays as views, gaps and all.

    Raises SnapshotCorruptError as :func:`cut_serialized`.
    """
    cut, first, _ = _cut("part_before", serialized, at, np.asarray)
    return first, cut.first


def _cut(
    op: str, serialized: SerializedSnapshot, at: int, taken: Callable[[np.ndarray], np.ndarray]
) -> tuple[_Cut, Meta, Meta]:
    """``taken`` makes an array of a view of half of one."""
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
        """The output goes with the token that it came with."""
        position = meta["position"]
        if position is None:
            return
        in_first = position < self.at
        halves[in_first].update(position=None, length=0, layers=[])
        for _, tensors in meta["layers"]:
            for array, _ in tensors:
                (self.first if in_first else self.second)[array] = self.arrays[array]
