"""Calls of models that leave their entries to guess: which rows a pass has, how many tokens of each.

Mamba 1 and RWKV-7 read their states and say nothing of tokens; RecurrentGemma and Baichuan-M1 take padding
for tokens; Llama 4 has one position for all rows. Here the call of such a model tells its prompt cache the
shape of the pass, and rows that the model would not tell apart are computed one after another, each without
its padding::

    row 0   . . a b         call 1: a b
    row 1   c d e f         call 2: c d e f, g h i j
    row 2   g h i j
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from kvcache.cache import OrderError
from kvcache.integrations.mlx_lm.attention import Bystander
from kvcache.integrations.mlx_lm.layer_cache import CacheList
from kvcache.integrations.mlx_lm.layers import OwnCacheList, entries_in
from kvcache.integrations.mlx_lm.rows import BatchRows

__all__ = ["told_by"]

_told: weakref.WeakSet[Any] = weakref.WeakSet()


def told_by(kind: Any) -> None:
    """Let models of this class tell prompt caches of ours what they are called with.

    With any other cache they do what they did.
    """
    if kind in _told:
        return
    _told.add(kind)
    original: Callable[..., Any] = kind.__call__

    @functools.wraps(original)
    def call(model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        others = [x for x in (*more, *named.values()) if x is not None]
        prompt_cache: Any = next((x for x in others if _rows(x) is not None), None)
        rows = _rows(prompt_cache)
        if rows is None or rows.called:
            return original(model, inputs, *more, **named)
        entries = [entry for entry in entries_in(prompt_cache) if not isinstance(entry, Bystander)]
        rows.settle()
        if any(entry.is_behind for entry in entries):
            raise OrderError(
                "update: some entries of the prompt cache did not take part in what the others did (a pass "
                "that failed half way, or something done to some of them only); rewind it, or make a new one"
            )
        count, tokens = inputs.shape[:2]
        rows.widen(count)
        groups = rows.alike(tokens)
        rows.called = True
        try:
            if groups is None or len(others) > 1:
                rows.pass_for(rows.events, tokens, count)
                return original(model, inputs, *more, **named)
            return _parted(model, inputs, prompt_cache, groups)
        finally:
            rows.called = False

    kind.__call__ = call


def _rows(given: Any) -> BatchRows | None:
    """Those of a prompt cache of ours; None of anything else."""
    rows = getattr(given[0], "rows", None) if isinstance(given, (list, tuple)) and given else None
    return rows if isinstance(rows, BatchRows) else None


def _parted(model: Any, inputs: Any, prompt_cache: Sequence[Any], groups: Sequence[Any]) -> Any:
    """The output for all rows, computed group by group; 0 where there is padding."""
    rows: BatchRows = prompt_cache[0].rows
    tokens = inputs.shape[1]
    found: dict[int, Any] = {}
    with rows.parted(tokens):
        for chosen, begin, count in groups:
            with rows.lent(chosen) as lent:
                entries = [_entry_of(entry, lent) for entry in prompt_cache]
                out = model(inputs[mx.array(chosen), begin : begin + count], cache=entries)
            for row, one in zip(chosen, out, strict=True):
                found[row] = mx.pad(one, [(begin, tokens - begin - count), *[(0, 0)] * (one.ndim - 1)])
    for entry in entries_in(prompt_cache):
        entry.catch_up()
    nothing = mx.zeros_like(next(iter(found.values())))
    return mx.stack([found.get(row, nothing) for row in range(inputs.shape[0])])


def _entry_of(entry: Any, rows: BatchRows) -> Any:
    if isinstance(entry, OwnCacheList):
        return CacheList(*(_entry_of(inner, rows) for inner in entry.caches))
    return entry.__class__(rows, entry.layer)
