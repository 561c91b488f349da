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
from kvcache.integrations.mlx_lm.layer_cache import CacheList, LayerCache
from kvcache.integrations.mlx_lm.layers import OwnCacheList, entries_in, mlx_caches, wanted_by
from kvcache.integrations.mlx_lm.rows import BatchRows

__all__ = ["parts_matter", "takes_one_length", "told_by"]

_BY_COLUMN = {"afm7", "deepseek_v41", "minimax_m3_vl"}
"""Types of models that take a query's column for its position, or have one position for all rows."""
_UNSETTLED = {"phi3small"}
"""Types that give other tokens where a prompt is parted otherwise: this one adds its mask to scores, as 0 and
1. There is no right answer for a row of a batch then, and mlx-lm gives none."""
_ROWS = 7
"""Of a batch that is tried: no number of heads."""


def parts_matter(model: Any) -> bool:
    """Whether a model gives other tokens where a prompt is evaluated in other parts."""
    return getattr(model, "model_type", None) in _UNSETTLED


def takes_one_length(model: Any) -> bool:
    """Whether a model takes for granted that the rows of a batch hold as many tokens as each other.

    So does one that fails where they do not: Gemma 2 has no room for a mask of each row. MLX is lazy: nothing
    is computed to find out.
    """
    kind = getattr(model, "model_type", None)
    if kind in _BY_COLUMN or kind in _UNSETTLED:
        return kind in _BY_COLUMN
    batch = [_batch_of(entry) for entry in wanted_by(model)]
    try:
        model(mx.zeros((_ROWS, 2), mx.int32), cache=batch)
    except Exception:  # whatever a model says of what it has no room for
        return True
    return False


def _batch_of(entry: Any) -> Any:
    """mlx-lm's own for a batch in which all rows but the first are padded; as it is where there is none."""
    padding = [0, *[1] * (_ROWS - 1)]
    if type(entry) is mlx_caches.CacheList:
        return mlx_caches.CacheList(*map(_batch_of, entry.caches))
    if type(entry) is mlx_caches.ArraysCache:
        return mlx_caches.ArraysCache(len(entry.cache), padding)
    if type(entry) is mlx_caches.RotatingKVCache:
        return mlx_caches.BatchRotatingKVCache(entry.max_size, padding)
    return mlx_caches.BatchKVCache(padding) if type(entry) is mlx_caches.KVCache else entry


_told: weakref.WeakSet[Any] = weakref.WeakSet()


def told_by(kind: Any) -> None:
    """Let models of this class tell prompt caches of ours what they are called with.

    One call after another: a call holds the lock of the pool. With any other cache they do what they did.
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
        with rows.pool.lock:
            try:
                if not rows.pool.storage.wants_calls:
                    return original(model, inputs, *more, **named)
                groups = _tell(rows, inputs, prompt_cache)
                rows.called = True
                if not groups or len(others) > 1:
                    rows.pass_for(rows.events, inputs.shape[1], inputs.shape[0])
                    return original(model, inputs, *more, **named)
                return _parted(model, inputs, prompt_cache, groups)
            except BaseException:
                rows.settle()
                raise
            finally:
                rows.called = False

    kind.__call__ = call


def _tell(rows: BatchRows, inputs: Any, prompt_cache: Sequence[Any]) -> Any:
    """What is coming; the rows that are to be computed apart, or None."""
    entries = [x for x in entries_in(prompt_cache) if isinstance(x, LayerCache)]  # kv_bits takes some out
    rows.settle()
    if any(entry.is_behind and not isinstance(entry, Bystander) for entry in entries):
        raise OrderError(
            "update: some entries of the prompt cache did not take part in what the others did (a pass "
            "that failed half way, or something done to some of them only); rewind it, or make a new one"
        )
    rows.widen(inputs.shape[0])
    return rows.alike(inputs.shape[1])


def _rows(given: Any) -> BatchRows | None:
    """Those of a prompt cache of ours; None of anything else."""
    several = given if isinstance(given, (list, tuple)) else ()
    found = (getattr(entry, "rows", None) for entry in several)
    return next((rows for rows in found if isinstance(rows, BatchRows)), None)


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
