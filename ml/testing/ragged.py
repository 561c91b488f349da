"""Random plans of ragged batches, and their attention computed from its definition."""

from __future__ import annotations

import math

import numpy as np

from ml.ragged import RaggedPlan


def random_plan(seed: int, tokens: int, cells: int) -> RaggedPlan:
    """A random plan for ``tokens`` queries over ``cells`` rows: bounded runs and lists of rows, some of them
    shared.

    Needs at least 4 rows. No query sees a row twice.
    """
    rng = np.random.default_rng(seed)
    edges = np.sort(rng.choice(np.arange(1, cells), min(cells - 1, int(rng.integers(1, 7))), replace=False))
    edges = np.concatenate(([0], edges, [cells]))
    segments: list[tuple[int, ...]] = []
    readers: list[tuple[int, int, int]] = []
    index: list[int] = []
    seen: set[int] = set()
    for number, (start, stop) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
        length, first, last = stop - start, len(readers), number == len(edges) - 2
        for query in range(tokens):
            if rng.random() < 0.6 or (last and query not in seen):
                begin = int(rng.integers(0, length)) if rng.random() < 0.3 else 0
                end = int(rng.integers(begin + 1, length + 1)) if rng.random() < 0.5 else length
                readers.append((query, begin, end))
                seen.add(query)
        if len(readers) == first:
            continue
        if rng.random() < 0.4:
            segments.append((1, len(index), length, first, len(readers)))
            index += rng.permutation(np.arange(start, stop)).tolist()
        else:
            segments.append((0, start, length, first, len(readers)))
    return RaggedPlan(tokens, np.array(segments), np.array(readers), np.array(index, dtype=np.int32))


def ragged_reference(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    plan: RaggedPlan,
    scale: float,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Attention as float64 (tokens, heads, v_dim), one query and head at a time."""
    query, key, value = (x.astype(np.float64) for x in (query, key, value))
    tokens, heads, _ = query.shape
    group = heads // key.shape[1]
    seen: list[list[int]] = [[] for _ in range(tokens)]
    for number, (_, _, _, first, stop) in enumerate(plan.segments.tolist()):
        rows = plan.rows(number).tolist()
        for reader, begin, end in plan.readers[first:stop].tolist():
            seen[reader] += rows[begin:end]
    out = np.zeros((tokens, heads, value.shape[2]))
    for token, rows in enumerate(seen):
        for head in range(heads):
            scores = key[rows, head // group] @ query[token, head] * scale
            top = scores.max() if sinks is None else max(scores.max(), float(sinks[head]))
            weights = np.exp(scores - top)
            total = weights.sum() + (0 if sinks is None else math.exp(float(sinks[head]) - top))
            out[token, head] = (weights / total) @ value[rows, head // group]
    return out
