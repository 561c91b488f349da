"""Which stored keys each query of a pass sees, as integers for one attention call over a whole batch.

A *segment* is a run of rows of the key and value buffers, or a list of rows, that one or more queries read. A
prefix that several sequences share, such as a system prompt, is one segment with all their queries as
readers, so that its bytes are read once (Juravsky et al., Hydragen, 2024; Ye et al., FlashInfer's cascade
attention)::

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
"""The number of integers in the header of ``packed``."""


class RaggedPlan:
    """Segments and their readers. All arrays are I32 on the host and must not be written.

    ``tokens``: the number of queries in the pass, numbered from 0 in batch order.

    ``segments`` (S, 5): ``gathered, start, length, first, stop`` each. The rows of a segment are ``[start,
    start + length)`` of the buffers, or ``index[start : start + length]`` if ``gathered`` is 1. ``[first,
    stop)`` are its readers.

    ``readers`` (R, 3): ``query, begin, end`` each: that query sees rows ``[begin, end)`` of the segment,
    ``0 <= begin < end <= length``. Every query has at least one reader, and no row twice.

    ``index`` (I,): rows of the buffers.

    ``part_starts`` (tokens + 1,) and ``parts`` (R,): the readers of query q are
    ``parts[part_starts[q] : part_starts[q + 1]]``.

    ``lay`` stores what a backend derives from the plan, such as launch parameters, for further layers, and
    ``packers`` records how: the caller can repeat this for the plan of the next pass before it requests
    attention, so that these arrays are uploaded together with its other data (``upload``).
    """

    __slots__ = (
        "_laid", "again", "index", "memo", "packers", "part_starts", "parts", "readers", "segments", "tokens",
        "upload",
    )  # fmt: skip

    def __init__(self, tokens: int, segments: np.ndarray, readers: np.ndarray, index: np.ndarray) -> None:
        """Takes ownership of the arrays. Raises ShapeError for other shapes, and for a query without
        readers.
        """
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
        if len(queries) == tokens and (queries == _counting(tokens)).all():  # each occurs once, in order
            self.part_starts, self.parts = _counting(tokens + 1), _counting(tokens)
        else:
            counts = np.bincount(queries.clip(0), minlength=tokens)
            if (queries < 0).any() or counts.size != tokens or not counts.all():
                raise ShapeError(
                    f"RaggedPlan: readers of {tokens} queries; each query must have at least one, and there "
                    "must be no others"
                )
            self.part_starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
            self.parts = np.argsort(queries, kind="stable").astype(np.int32)
        self._begin()

    def _begin(self) -> None:
        self.memo: dict[object, Any] = {}
        """What a host backend derives from the plan, for further layers."""
        self.again: Again | None = None
        """``again(ctx, query, key, value, scale)``: the attention of further layers over plain storage, if
        the backend has set it with that of the first; None if their tensors differ from the first's.
        """
        self.packers: dict[str, Pack] = {}
        self.upload: Callable[[np.ndarray], Callable[[Context], Tensor]] = _uploaded
        """Takes an I32 array, which must not change; returns a function that returns it on the device of a
        context.
        """
        self._laid: dict[str, tuple[Any, Callable[[Context], Tensor]]] = {}

    def grown(self, segments: np.ndarray, rows: int) -> RaggedPlan:
        """The plan with these segments, of one reader each, longer by ``rows``, which their readers see."""
        made = object.__new__(RaggedPlan)
        made.tokens, made.index, made.part_starts, made.parts = (
            self.tokens, self.index, self.part_starts, self.parts,
        )  # fmt: skip
        made.segments, made.readers = self.segments.copy(), self.readers.copy()
        if segments.size == 1:  # indexing by an array takes longer
            (tail,) = segments.tolist()
            made.segments[tail, 2] += rows
            made.readers[made.segments[tail, 3], 2] += rows
        else:
            made.segments[segments, 2] += rows
            made.readers[made.segments[segments, 3], 2] += rows
        made._begin()
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        # Not what backends keep with a plan: it has addresses of this one's arrays.
        return RaggedPlan, (self.tokens, self.segments, self.readers, self.index)

    def rows(self, segment: int) -> np.ndarray:
        """The buffer rows of a segment, in order."""
        gathered, start, length, _, _ = self.segments[segment].tolist()
        return self.index[start : start + length] if gathered else np.arange(start, start + length)

    def pack(self) -> np.ndarray:
        """The whole plan in one I32 array: a header of 8, then the flattened arrays in the order of the
        header.

        The header is ``tokens, S, R, I`` and the offsets of ``readers``, ``index``, ``part_starts`` and
        ``parts``; ``segments`` begin at 8.
        """
        arrays = [self.segments, self.readers, self.index, self.part_starts, self.parts]
        places = np.cumsum([HEADER, *(array.size for array in arrays[:-1])])[1:]
        sizes = [self.tokens, len(self.segments), len(self.readers), self.index.size]
        return np.concatenate([np.array(sizes), places, *(array.ravel() for array in arrays)]).astype(
            np.int32
        )

    def packed(self, ctx: Context) -> Tensor:
        """``pack`` on the device of ``ctx``, uploaded once."""
        return self.lay_whole()(ctx)

    def lay_whole(self) -> Callable[[Context], Tensor]:
        """Upload ``packed`` together with the other arrays of ``lay``."""
        return self.lay("plan", _whole)[1]

    def lay(self, kind: str, pack: Pack) -> tuple[Any, Callable[[Context], Tensor]]:
        """The result of ``pack`` for this plan, stored under ``kind``: its data, and its array on a device.

        Arrays added before the first one is used are uploaded together.
        """
        self.packers[kind] = pack
        if kind not in self._laid:
            kept, array = pack(self)
            self._laid[kind] = kept, self.upload(array)
        return self._laid[kind]


def _counting(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int32)


Again = Callable[[Any, Any, Any, Any, float], "Tensor | None"]
Pack = Callable[[RaggedPlan], tuple[Any, np.ndarray]]
"""The data that a backend keeps of a plan, and the I32 array that it uploads."""


def _whole(plan: RaggedPlan) -> tuple[None, np.ndarray]:
    return None, plan.pack()


def _uploaded(array: np.ndarray) -> Callable[[Context], Tensor]:
    """Upload an array separately, once to each device."""
    near: dict[int, Tensor] = {}

    def on(ctx: Context) -> Tensor:
        device: int = getattr(ctx, "device_index", 0)
        if device not in near:
            near[device] = ctx.from_numpy(array, DType.I32)
        return near[device]

    return on
