"""K and V of one layer as codes, for the decode loop: quantized and written with little around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from backends.mlx.block_formats import blocks_of
from backends.mlx.errors import MLX_ERRORS
from backends.mlx.store import Half
from backends.mlx.tensor import MlxTensor
from backends.mlx.work import MlxWork
from ml.base import BaseBackend


class MlxQuantizedStore:
    """See :class:`ml.SupportsQuantizedStore`; over parts (rows, heads, ...), each all of its storage."""

    def __init__(
        self, backend: BaseBackend, work: MlxWork, halves: list[Half], eight: tuple[bool, bool]
    ) -> None:
        self._backend, self._work = backend, work
        self._halves, self._eight = halves, eight
        self._shapes = [(half.shape[0], half.shape[1] * 32) for half in halves[1::2]]
        """Of a row of K and of V."""
        self._alike = self._shapes[0] == self._shapes[1] and eight[0] == eight[1]
        self._rows = halves[0].storage.shape[halves[0].axis]

    @classmethod
    def over(
        cls, backend: BaseBackend, work: MlxWork, parts: Sequence[MlxTensor], formats: tuple[str, str]
    ) -> MlxQuantizedStore | None:
        """``parts``: codes and scales of K and then of V. None where they are strided in another way."""
        if not {"Q8_0", "Q4_0"}.issuperset(formats):
            return None
        halves = Half.each(*parts)
        if halves is None or any(half.order != halves[0].order or half.order[2] != 2 for half in halves):
            return None
        return cls(backend, work, halves, (formats[0] == "Q8_0", formats[1] == "Q8_0"))

    def write(self, ctx: Any, start: int, count: int, key: Any, value: Any) -> bool:
        backend, work, halves = self._backend, self._work, self._halves
        if ctx.active_backend is not backend or backend.closed:
            return False
        if not 0 <= start <= self._rows - count or count < 1:
            return False
        try:
            with work.lock, work.on_stream:
                given = [
                    self._floats(x, count, shape) for x, shape in zip((key, value), self._shapes, strict=True)
                ]
                if given[0] is None or given[1] is None:
                    return False
                found = self._encoded(given[0], given[1])
                for half, new in zip(halves, found, strict=True):
                    if not half.storage.claim():
                        half.storage.prepare_write(new)
                    half.storage.array[(*half.before, slice(start, start + count))] = new
                nbytes = sum(new.nbytes for new in found)
                work.defer_pair(halves[0].ref, halves[1].ref, nbytes)
                work.defer_pair(halves[2].ref, halves[3].ref, 0)
        except MLX_ERRORS:
            return False
        return True

    def read(self, ctx: Any, start: int, count: int) -> None:
        """Never: codes are read as floats elsewhere."""
        return

    def _floats(self, source: Any, count: int, shape: tuple[int, int]) -> Any:
        """The array of ``source``, its axes in the order of the storages; None unless it is plain."""
        if type(source) is not MlxTensor or source.backend is not self._backend or not source.dtype.is_float:
            return None
        held = source.storage
        if source.shape != (count, *shape) or held.array is None:
            return None
        i, j, k = self._halves[0].order
        sizes, steps = source.shape, source.strides
        return held.read(source.offset, (sizes[i], sizes[j], sizes[k]), (steps[i], steps[j], steps[k]))

    def _encoded(self, key: Any, value: Any) -> tuple[Any, Any, Any, Any]:
        """Codes and scales of both, in one go where they are in one format."""
        if self._alike and key.dtype == value.dtype:
            codes, scales = (mx.split(x, 2) for x in blocks_of(mx.concatenate([key, value]), self._eight[0]))
            return codes[0], scales[0], codes[1], scales[1]
        return *blocks_of(key, self._eight[0]), *blocks_of(value, self._eight[1])
