"""Wraps calls of models that do not tell their entries the rows and tokens of a pass. Mamba 1 and RWKV-7 read
their states without giving a number of tokens; RecurrentGemma and Baichuan-M1 treat padding as tokens; Llama
4 uses one position for all rows. The wrapped call passes the shape of its input to the prompt cache. Rows
that the model would confuse are computed one after another, without padding::

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
"""Model types that use a query's column as its position, or one position for all rows."""
_UNSETTLED = {"phi3small"}
"""Model types whose output depends on how a prompt is split: this one adds its mask to the scores as 0 and 1.
A row of a batch then has no correct result, and mlx-lm has none either.
"""
_ROWS = 7
"""The rows of a trial batch; not a plausible number of heads."""


def parts_matter(model: Any) -> bool:
    """Whether a model's output depends on how a prompt is split into parts."""
    return getattr(model, "model_type", None) in _UNSETTLED


def takes_one_length(model: Any) -> bool:
    """Whether a model assumes that all rows of a batch have the same length. This includes models that fail
    otherwise: Gemma 2 does not accept a mask per row. Nothing is computed, since MLX is lazy.
    """
    kind = getattr(model, "model_type", None)
    if kind in _BY_COLUMN or kind in _UNSETTLED:
        return kind in _BY_COLUMN
    batch = [_batch_of(entry) for entry in wanted_by(model)]
    try:
        model(mx.zeros((_ROWS, 2), mx.int32), cache=batch)
    except Exception:  # the error of an unsupported mask is up to the model
        return True
    return False


def _batch_of(entry: Any) -> Any:
    """mlx-lm's own entry for a batch in which all rows except the first are padded; unchanged if it has
    none.
    """
    padding = [0, *[1] * (_ROWS - 1)]
    if type(entry) is mlx_caches.CacheList:
        return mlx_caches.CacheList(*map(_batch_of, entry.caches))
    if type(entry) is mlx_caches.ArraysCache:
        return mlx_caches.ArraysCache(len(entry.cache), padding)
    if type(entry) is mlx_caches.RotatingKVCache:
        return mlx_caches.BatchRotatingKVCache(entry.max_size, padding)
    return mlx_caches.BatchKVCache(padding) if type(entry) is mlx_caches.KVCache else entry


_announcing: weakref.WeakSet[Any] = weakref.WeakSet()


def told_by(kind: Any) -> None:
    """Make models of this class pass the shape of their calls to our prompt caches. A call holds the pool's
    lock. With any other cache their behaviour is unchanged.
    """
    if kind in _announcing:
        return
    _announcing.add(kind)
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
    """Announce a call; returns the rows to compute separately, or None."""
    entries = [x for x in entries_in(prompt_cache) if isinstance(x, LayerCache)]  # kv_bits removes some
    rows.settle()
    if any(entry.is_behind and not isinstance(entry, Bystander) for entry in entries):
        raise OrderError(
            "update: some entries of the prompt cache did not take part in what the others did (a pass "
            "failed midway, or an operation reached only some of them); rewind it, or make a new one"
        )
    rows.widen(inputs.shape[0])
    return rows.alike(inputs.shape[1])


def _rows(prompt_cache: Any) -> BatchRows | None:
    """The rows of one of our prompt caches; None for anything else."""
    several = prompt_cache if isinstance(prompt_cache, (list, tuple)) else ()
    all_rows = (getattr(entry, "rows", None) for entry in several)
    return next((rows for rows in all_rows if isinstance(rows, BatchRows)), None)


def _parted(model: Any, inputs: Any, prompt_cache: Sequence[Any], groups: Sequence[Any]) -> Any:
    """The output for all rows, computed group by group; 0 in padding."""
    rows: BatchRows = prompt_cache[0].rows
    tokens = inputs.shape[1]
    outputs: dict[int, Any] = {}
    with rows.parted(tokens):
        for chosen, begin, count in groups:
            with rows.lent(chosen) as lent:
                entries = [_entry_of(entry, lent) for entry in prompt_cache]
                out = model(inputs[mx.array(chosen), begin : begin + count], cache=entries)
            for row, one in zip(chosen, out, strict=True):
                outputs[row] = mx.pad(one, [(begin, tokens - begin - count), *[(0, 0)] * (one.ndim - 1)])
    for entry in entries_in(prompt_cache):
        entry.catch_up()
    nothing = mx.zeros_like(next(iter(outputs.values())))
    return mx.stack([outputs.get(row, nothing) for row in range(inputs.shape[0])])


def _entry_of(entry: Any, rows: BatchRows) -> Any:
    if isinstance(entry, OwnCacheList):
        return CacheList(*(_entry_of(inner, rows) for inner in entry.caches))
    return entry.__class__(rows, entry.layer)
