"""Which stored keys each query of a pass sees, in integers: what one attention call for a whole batch needs.

A *segment* is a run of rows of the key and value buffers, or a list of rows, that one or more queries read.
What several sequences share, such as a system prompt, is one segment with all their queries as readers, so
that its bytes are read once (Juravsky et al., Hydragen, 2024; Ye et al., FlashInfer's cascade attention)::

    rows 0 to 9      system prompt      readers 0, 1, 2     every one sees all of it: [0, 10)
    rows 10 to 12    sequence 0's own   reader 0            [0, 3)
    rows 40, 41, 7   sequence 1's own   readers 1, 2        tokens 1 and 2 are its last two: [0, 2) and [0, 3)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ml.dtypes import DType
from ml.errors import ShapeError
from ml.protocols import Context, Tensor

__all__ = ["RaggedPlan"]

HEADER = 8
"""Integers at the front of ``packed``."""


class RaggedPlan:
    """Segments, and who reads what of them. All arrays are I32 on the host and are not to be written.

    ``tokens``: how many queries the pass has, numbered from 0 in the order of the batch.

    ``segments`` (S, 5): ``gathered, start, length, first, stop`` each. The rows of a segment are ``[start,
    start + length)`` of the buffers, or, where ``gathered`` is 1, ``index[start : start + length]``.
    ``[first, stop)`` are its readers.

    ``readers`` (R, 3): ``query, begin, end`` each: that query sees rows ``[begin, end)`` of the segment,
    ``0 <= begin < end <= length``. Every query has at least one reader, and no row twice.

    ``index`` (I,): rows of the buffers.

    ``part_starts`` (tokens + 1,) and ``parts`` (R,): the readers of query q are
    ``parts[part_starts[q] : part_starts[q + 1]]``.

    ``memo`` keeps what a backend derives from the plan, such as its launch parameters, for further layers.

    ``packers`` and ``packed_ahead`` let what a backend uploads of a plan go with what its caller uploads. A
    backend notes by a name of its choice how it packs plans, as (what it keeps, an I32 array). The caller may
    do so for the plan of the next pass, and say where the array is on a device, before it asks for attention.
    """

    __slots__ = (
        "_packed", "index", "memo", "packed_ahead", "packers", "part_starts", "parts", "readers", "segments",
        "tokens",
    )  # fmt: skip

    def __init__(self, tokens: int, segments: np.ndarray, readers: np.ndarray, index: np.ndarray) -> None:
        """Takes the arrays over. Raises ShapeError for other shapes, and for a query without readers."""
        self.tokens = tokens
        self.segments = np.ascontiguousarray(segments, dtype=np.int32)
        self.readers = np.ascontiguousarray(readers, dtype=np.int32)
        self.index = np.ascontiguousarray(index, dtype=np.int32)
        shapes = self.segments.shape[1:], self.readers.shape[1:], self.index.ndim
        if shapes != ((5,), (3,), 1):
            raise ShapeError(
                f"RaggedPlan: segments {segments.shape}, readers {readers.shape}, index {index.shape}; "
                "they are (S, 5), (R, 3) and (I,)"
            )
        queries = self.readers[:, 0]
        counts = np.bincount(queries, minlength=tokens)
        if counts.size != tokens or not counts.all():
            raise ShapeError(
                f"RaggedPlan: readers of {tokens} queries; each query needs one, and no other has any"
            )
        self.part_starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        self.parts = np.argsort(queries, kind="stable").astype(np.int32)
        self.memo: dict[str, Any] = {}
        self.packers: dict[str, Callable[[RaggedPlan], tuple[Any, np.ndarray]]] = {}
        self.packed_ahead: dict[str, tuple[Any, Callable[[Context], Tensor]]] = {}
        self._packed: tuple[Context, Tensor] | None = None

    @property
    def most_parts(self) -> int:
        """In how many segments the query with the most of them reads."""
        return int((self.part_starts[1:] - self.part_starts[:-1]).max())

    def rows(self, segment: int) -> np.ndarray:
        """The buffer rows of a segment, in order."""
        gathered, start, length, _, _ = self.segments[segment].tolist()
        return self.index[start : start + length] if gathered else np.arange(start, start + length)

    def pack(self) -> np.ndarray:
        """All of it in one I32 array: a header of 8, then the arrays, flattened, in the order of the header.

        The header is ``tokens, S, R, I``, and the places where ``readers``, ``index``, ``part_starts`` and
        ``parts`` begin; ``segments`` begin at 8.
        """
        arrays = [self.segments, self.readers, self.index, self.part_starts, self.parts]
        places = np.cumsum([HEADER, *(array.size for array in arrays[:-1])])[1:]
        sizes = [self.tokens, len(self.segments), len(self.readers), self.index.size]
        return np.concatenate([np.array(sizes), places, *(array.ravel() for array in arrays)]).astype(
            np.int32
        )

    def packed(self, ctx: Context) -> Tensor:
        """``pack`` as a tensor of ``ctx``: uploaded once for as long as the same context asks."""
        if self._packed is None or self._packed[0] is not ctx:
            self._packed = ctx, ctx.from_numpy(self.pack(), DType.I32)
        return self._packed[1]
