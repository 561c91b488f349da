"""Tests by computation whether padding affects the states of a model's layers. A model that gets a mask from
its entries may ignore it (Jamba), or apply it to one of its states and not to another (Nemotron-H). So rows
are computed alone, and as a batch with announced padding. The effect of unannounced padding is the
reference::

    alone   a b     | c            d d d d d d  | d d d
    right   a b . . | . . | c . .  d d d d | d d | d d d
    left    . . . a b | c          d d d d d | d
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx

from kvcache.integrations.mlx_lm.layers import Layer, Recurrent, Several, entries_in, flat

__all__ = ["keep_whole_steps", "with_padding_told"]

ssm: Any = importlib.import_module("mlx_lm.models.ssm")

_seen: weakref.WeakKeyDictionary[type, set[tuple[Any, ...]]] = weakref.WeakKeyDictionary()
"""By class of a model, the layers for which padding was found not to affect the states."""
_TOKENS = {"a": 1, "b": 2, "c": 3, "d": 4, ".": 5}
_Pass = tuple[tuple[str, ...], dict[str, list[int]]]
"""The columns of each row, "." for padding, and what is announced before the pass."""
_RIGHT: Sequence[_Pass] = (
    (("ab..", "dddd"), {"lengths": [2, 6], "right_padding": [4, 0]}),
    (("..", "dd"), {}),
    (("c..", "ddd"), {"lengths": [1, 3], "right_padding": [2, 0]}),
)
_LEFT: Sequence[_Pass] = ((("...ab", "ddddd"), {"left_padding": [3, 0]}), (("c", "d"), {}))
_EXACT, _ROUNDED = 1e-3, 0.25
"""The largest rounding error relative to the effect of unannounced padding: in float32, and in narrower
floats.
"""


def with_padding_told(
    model: Any, layers: Sequence[Layer | Several], pool_of: Callable[[Sequence[Layer | Several]], Any]
) -> list[Layer | Several]:
    """``layers``, with ``masked`` False for layers with states unless padding affects none of them.
    ``pool_of`` makes a small CachePool of layers. A few tokens are computed, once for each class of models
    and its layers; if that fails, padding counts as affecting the states.
    """
    states = [x for x in flat(layers) if isinstance(x, Recurrent)]
    known = _seen.setdefault(type(model), set())
    if not all(x.masked for x in states) or not states or tuple(layers) in known:
        return list(layers)
    try:
        kept_out = _is_kept_out(model, pool_of(layers))
    except Exception:  # the error of an unsupported input is up to the model
        kept_out = False
    if not kept_out:
        return [_unmasked(entry) for entry in layers]
    known.add(tuple(layers))
    return list(layers)


def _unmasked(entry: Any) -> Any:
    if isinstance(entry, Several):
        return Several(tuple(map(_unmasked, entry.layers)))
    return dataclasses.replace(entry, masked=False) if isinstance(entry, Recurrent) else entry


def _is_kept_out(model: Any, pool: Any) -> bool:
    """Whether unannounced padding changes the states of a row, and announced padding does not."""
    precise = {dtype for layer in pool.storage.layers for dtype in _dtypes(layer)} == {mx.float32}
    least, changed = _EXACT if precise else _ROUNDED, False
    try:
        for passes in (_RIGHT, _LEFT):
            announced = _states(model, pool, passes)
            for row in (0, 1):
                own = [((columns[row],), dict[str, list[int]]()) for columns, _ in passes]
                unannounced = _states(model, pool, own)
                alone = _states(model, pool, [((x[0].replace(".", ""),), none) for x, none in own])
                for right, announced_state, spoilt in zip(alone, announced, unannounced, strict=True):
                    size, harm = _largest(right), _largest(spoilt - right)
                    if not _largest(announced_state[row : row + 1] - right) <= least * max(size, harm):
                        return False
                    changed |= harm > least * size
    finally:
        pool.close()
    return changed


def _dtypes(layer: Layer) -> tuple[Any, ...]:
    return layer.dtypes if isinstance(layer, Recurrent) else () if layer.dtype is None else (layer.dtype,)


def _states(model: Any, pool: Any, passes: Iterable[_Pass]) -> list[mx.array]:
    """The states of all rows after these passes, each (rows, *shape)."""
    prompt_cache = pool.make_prompt_cache()
    for rows, announced in passes:
        for entry in prompt_cache if announced else ():
            entry.prepare(**announced)
        if any(rows):
            model(mx.array([[_TOKENS[name] for name in row] for row in rows]), cache=prompt_cache)
            pool.storage.ctx.compute()
    layers = zip(entries_in(prompt_cache), pool.storage.layers, strict=True)
    kept = [state for entry, layer in layers if isinstance(layer, Recurrent) for state in entry.cache]
    states = [state.astype(mx.float32) for state in kept]
    mx.eval(states)
    return states


def _largest(x: mx.array) -> float:
    return float(mx.abs(x).max())


@functools.cache
def keep_whole_steps() -> None:
    """Wrap ``ssm_attn`` of mlx-lm's Mamba 2, once. It processes a pass in steps of 256 columns, and treats a
    row whose tokens end exactly with a step as if it continued. In that case shorter steps are used.
    """
    original = ssm.ssm_attn

    @functools.wraps(original)
    def ssm_attn(*arguments: Any, **named: Any) -> Any:
        bound = inspect.signature(original).bind(*arguments, **named)
        bound.apply_defaults()
        operands, columns = bound.arguments, arguments[0].shape[1]
        if operands["lengths"] is not None and columns > operands["step"]:
            ends = [count for count in operands["lengths"].tolist() if 0 < count < columns]
            while any(count % operands["step"] == 0 for count in ends):
                operands["step"] -= 1
        return original(**operands)

    ssm.ssm_attn = ssm_attn
