"""Report on what a step that decodes a token of every sequence reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import ml
from kvcache.attention.batch import SequenceTokens
from kvcache.attention.calls import plan_calls
from kvcache.attention.history import LowerBound
from kvcache.attention.segments import find_segments
from kvcache.storage.cell_table import CellTable


@dataclass(frozen=True, slots=True)
class StepReads:
    """What a step that decodes a token of every sequence reads in each layer, in cells: see
    ``CausalCache.step_reads``.
    """

    calls: int
    """Of attention, on a backend without a kernel for ragged batches."""
    cells: int
    """Read, each counted once."""
    shared: int
    """Of these read once for several sequences."""
    saved: int
    """What reading those for each of the sequences would come to besides."""
    gathered: int
    """Of all that is read copied together first."""
    padding: int
    """Read besides, so that sequences of different lengths are one call."""


def step_reads(table: CellTable, config: ml.CacheConfig, lower: LowerBound | None, worth: int) -> StepReads:
    """The report on how sequences lie now; nothing is changed."""
    occupied = [(seq, row.last) for seq, row in table.occupied()]
    groups = [
        SequenceTokens(seq, np.array([last]), slice(i, i + 1), last) for i, (seq, last) in enumerate(occupied)
    ]
    segments = find_segments(table, groups, lower, frozenset(), worth)
    levels, _ = plan_calls(segments, len(groups), table, config, worth)
    calls = [call for level in levels for call in level]
    shared = [(segment.length, segment.queries.size) for segment in segments if segment.queries.size > 1]
    total = sum(segment.length for segment in segments)
    gathered = sum(call.cells.size for call in calls if call.cells is not None)
    viewed = sum(call.batch * call.length for call in calls if call.cells is None)
    return StepReads(
        calls=len(calls),
        cells=total,
        shared=sum(length for length, _ in shared),
        saved=sum(length * (readers - 1) for length, readers in shared),
        gathered=gathered,
        padding=viewed + gathered - total,
    )
