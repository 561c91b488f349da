"""What each layer of an mlx-lm model stores, determined from the model. ``make_cache`` returns the caches
that a model wants, and a pass over one token shows the shapes: since MLX is lazy, the pass only builds a
graph, which is discarded unevaluated.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache

from kvcache.cache import NotSupportedError, check_whole

__all__ = [
    "Attention", "Layer", "Recurrent", "Several", "computes_over_groups", "entries_in", "flat", "layers_of",
    "wanted_by",
]  # fmt: skip

mlx_caches: Any = cache
"""``mlx_lm.models.cache``, which is only partly typed."""
OwnKVCache: Any = cache.KVCache
OwnRotatingKVCache: Any = cache.RotatingKVCache
OwnChunkedKVCache: Any = cache.ChunkedKVCache
OwnArraysCache: Any = cache.ArraysCache
OwnCacheList: Any = cache.CacheList


@dataclass(frozen=True, slots=True)
class Attention:
    """A layer with K and V.

    ``window``: a query sees itself and the ``window - 1`` tokens before it; None: all of the past. Shapes
    that are None are set by the first K and V.
    """

    window: int | None = None
    kv_heads: int | None = None
    key_dim: int | None = None
    value_dim: int | None = None
    dtype: Any = None
    """The MLX dtype in which the model computes K and V."""
    max_size: int | None = None
    """The ``max_size`` of mlx-lm's RotatingKVCache if the model's masks look further back; else None."""
    used: bool = True
    """Whether the model uses the layer's entry at all."""
    keys_only: bool = False
    """Whether only K is stored: V is its first ``value_dim`` numbers, and is not read."""
    assigned: bool = False
    """Whether the model assigns K and V of the entry, to their current value or to unused zeros."""
    chunked: bool = False
    """Whether a query sees only its own chunk of ``window`` positions, through a mask made by the model."""
    keep: int = 0
    """The number of first tokens that are part of the ``window`` and never evicted."""


@dataclass(frozen=True, slots=True)
class Growth:
    """The growth of a state along ``axis``: by one for ``every`` tokens of a row. ``rest``: the state holds
    the tokens since the last multiple of ``every``, and is emptied at each multiple.
    """

    axis: int
    every: int = 1
    rest: bool = False

    def size(self, full: int, tokens: int) -> int:
        """The state's size along ``axis`` after ``tokens`` tokens, at most ``full``."""
        return tokens % self.every if self.rest else min(full, tokens // self.every)


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A layer with states of fixed size; ``shapes`` has one shape per state, for one row."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    masked: bool = True
    """Whether the model uses the mask that separates tokens from padding."""
    reads_first: bool = False
    """Whether the model reads the states before it gives the number of tokens of a pass."""
    growing: tuple[Growth | None, ...] = ()
    """How each state grows to its full size; None: it has full size from the start."""
    names: tuple[str, ...] = ()
    """The model's names for the states of its entry; (): they are numbered."""
    capacity: int | None = None
    """The most tokens of a row that growing states have room for; None: any number."""


Layer = Attention | Recurrent


@dataclass(frozen=True, slots=True)
class Several:
    """An entry of several caches, mlx-lm's CacheList: a layer with attention beside states, or twice."""

    layers: tuple[Layer, ...]


def flat(entries: Iterable[Layer | Several]) -> list[Layer]:
    """The layers of all entries, flattened."""
    several = (entry.layers if isinstance(entry, Several) else (entry,) for entry in entries)
    return [layer for layers in several for layer in layers]


def entries_in(prompt_cache: Iterable[Any]) -> list[Any]:
    """The entries of a prompt cache (ours or mlx-lm's), with nested entries flattened."""
    inner = (entry.caches if isinstance(entry, OwnCacheList) else (entry,) for entry in prompt_cache)
    return [entry for entries in inner for entry in entries]


def layers_of(model: Any, max_kv_size: int | None = None, capacity: int = 4096) -> list[Layer | Several]:
    """The layers of ``model``, in the order of its prompt cache.

    ``max_kv_size`` as in mlx-lm's ``make_prompt_cache``: layers see the first 4 tokens, which are never
    evicted, and the last ``max_kv_size - 4``. ``capacity`` is the most tokens that growing states have room
    for.

    Raises NotSupportedError for a layer with an unsupported kind of cache, and for a model that uses its
    prompt cache in an unsupported way.
    """
    for part in model.modules() if hasattr(model, "modules") else ():
        if getattr(part, "pipeline_size", 1) > 1:
            raise NotSupportedError(
                f"make_prompt_cache: a pipeline over {part.pipeline_size} processes, whose model stores "
                "communication in its last entry; use mlx-lm's own cache"
            )
    wanted = wanted_by(model, max_kv_size)
    for i, entry in enumerate(wanted):
        _check_kind(i, entry)
    with _watched(entries_in(wanted)) as calls:
        model(mx.zeros((1, 1), mx.int32), cache=wanted)
    first = {id(entry): _shapes(entry) for entry in entries_in(wanted)}
    if any(1 in shape for shapes in first.values() for shape in shapes):
        model(mx.zeros((1, _MORE), mx.int32), cache=wanted)
    if any(is_compressed(entry) for entry in wanted):
        return [*compressed_layers(model, wanted, capacity)]
    wanted_layers: list[Layer | Several] = []
    for i, entry in enumerate(wanted):
        layers = [_layer(i, inner, calls, first[id(inner)]) for inner in entries_in([entry])]
        wanted_layers.append(Several(tuple(layers)) if type(entry) is mlx_caches.CacheList else layers[0])
    return wanted_layers


KEEP = 4
"""The first tokens that mlx-lm's ``max_kv_size`` keeps."""


def wanted_by(model: Any, max_kv_size: int | None = None) -> list[Any]:
    """The empty prompt cache that mlx-lm makes for the model."""
    make = getattr(type(model), "make_cache", None)  # not the instance's, which may already be ours
    if max_kv_size is None:
        return list(make(model)) if make is not None else [mlx_caches.KVCache() for _ in model.layers]
    max_kv_size = check_whole("make_prompt_cache", "max_kv_size", max_kv_size, least=KEEP + 1)
    if make is not None:
        raise NotSupportedError(
            f"make_prompt_cache: max_kv_size={max_kv_size}; this model's make_cache decides what its layers "
            "keep, and mlx-lm ignores max_kv_size for such a model. Omit it, and limit memory with capacity="
        )
    return [mlx_caches.RotatingKVCache(max_size=max_kv_size, keep=KEEP) for _ in model.layers]


def computes_over_groups(model: Any, layers: Iterable[Layer], group_size: int, bits: int) -> bool:
    """Whether mlx-lm's model computes over QuantizedKVCache in the place of its KVCache. Latents and sinks do
    not. Nothing is computed here, since MLX is lazy.
    """
    if any(isinstance(layer, Attention) and (layer.keys_only or layer.assigned) for layer in layers):
        return False

    def quantized(entry: Any) -> Any:
        if type(entry) is mlx_caches.CacheList:
            return mlx_caches.CacheList(*map(quantized, entry.caches))
        if type(entry) is not mlx_caches.KVCache:
            return entry
        return mlx_caches.QuantizedKVCache(group_size=group_size, bits=bits)

    wanted = [quantized(entry) for entry in wanted_by(model)]
    try:
        for tokens in (2, 1):  # a prompt's mask, and a step's
            model(mx.zeros((1, tokens), mx.int32), cache=wanted)
    except Exception:  # the error of a model that cannot is up to the model
        return False
    return True


_COMPRESSED = "mlx_lm.models.deepseek_v41"
"""The module whose entries have their own class: a window, a latent for each group of tokens, and an open
group.
"""


def is_compressed(entry: Any) -> bool:
    """Whether this is an entry of mlx-lm's deepseek_v41."""
    return type(entry).__name__ == "LayerCache" and type(entry).__module__ == _COMPRESSED


def compressed_layers(model: Any, wanted: Sequence[Any], capacity: int) -> list[Recurrent]:
    """The layers of a deepseek_v41 model with the empty entries ``wanted``."""
    parts = [layer.self_attn for layer in model.layers]
    every = [max(1, part.ratio) if part.is_kv_source else 0 for part in parts]
    model(mx.zeros((1, max(every) or 1), mx.int32), cache=wanted)  # MLX is lazy: nothing is computed
    layers = []
    for entry, one in zip(wanted, every, strict=True):
        grown = {"window": (entry.window_size, Growth(0))}
        if one:
            grown |= dict.fromkeys(("compress_kv", "index_k"), (max(1, capacity // one), Growth(0, one)))
            grown |= dict.fromkeys(("pending_kv", "pending_gate"), (one - 1, Growth(0, one, rest=True)))
        states = {name: state for name in grown if (state := getattr(entry, name)) is not None}
        shapes = tuple((grown[name][0], state.shape[2]) for name, state in states.items())
        dtypes = tuple(state.dtype for state in states.values())
        growing = tuple(grown[name][1] for name in states)
        layers.append(
            Recurrent(
                shapes,
                dtypes,
                masked=False,
                reads_first=True,
                growing=growing,
                names=(*states,),
                capacity=max(capacity, one) if one else None,
            )
        )
    return layers


def _check_kind(i: int, entry: Any) -> None:
    kind = type(entry)
    if kind is mlx_caches.CacheList and entry.caches:
        for inner in entry.caches:
            _check_kind(i, inner)
        return
    if kind in (mlx_caches.KVCache, mlx_caches.RotatingKVCache, mlx_caches.ChunkedKVCache):
        return
    if (kind is mlx_caches.ArraysCache and entry.cache) or is_compressed(entry):
        return
    raise NotSupportedError(
        f"make_prompt_cache: layer {i} of the model wants mlx-lm's {kind.__name__}; supported are KVCache, "
        "RotatingKVCache, ChunkedKVCache, ArraysCache, CacheList of these, and DeepSeek-V4.1's "
        "LayerCache; use mlx-lm's own cache"
    )


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that a model made to one of its entries; ``name`` is the method's."""

    entry: Any
    name: str
    window: int | None = None
    value: str = ""
    """For assigned K and V: their new value; for K and V that are put: whether they are one array."""


_DONE = "done"
_WATCHED = ("make_mask", "update_and_fetch", "keys_and_values", "__getitem__", "__setitem__")


@contextmanager
def _watched(entries: Sequence[Any]) -> Iterator[list[_Call]]:
    """The calls that are made to ``entries`` in the block, in order."""
    calls: list[_Call] = []
    kinds = [type(entry) for entry in entries]
    for entry, kind in zip(entries, kinds, strict=True):
        methods = {name: _noting(calls, kind, name) for name in _WATCHED if hasattr(kind, name)}
        methods["__setattr__"] = _noting_writes(calls, kind)
        entry.__class__ = type(kind.__name__, (kind,), methods)
    yield calls
    for entry, kind in zip(entries, kinds, strict=True):
        entry.__class__ = kind


_ALIKE, _KEPT, _ZEROS, _OTHER = "alike", "kept", "zeros", "other"


def _noting(calls: list[_Call], kind: Any, name: str) -> Callable[..., Any]:
    method = getattr(kind, name)

    def noted(entry: Any, *arguments: Any, **named: Any) -> Any:
        alike = name == "update_and_fetch" and len(arguments) == 2 and arguments[0] is arguments[1]
        calls.append(_Call(entry, name, named.get("window_size"), _ALIKE if alike else ""))
        result = method(entry, *arguments, **named)
        if name == "update_and_fetch":
            for part in ("keys", "values"):
                kind.__setattr__(entry, part, _numbered(getattr(entry, part)))
        calls.append(_Call(entry, _DONE))
        return result

    return noted


def _noting_writes(calls: list[_Call], kind: Any) -> Callable[..., None]:
    """Records assignments of K and V by the model, outside of the entry's own methods."""

    def set_attribute(entry: Any, name: str, value: Any) -> None:
        if name in ("keys", "values") and (not calls or calls[-1].name == _DONE):
            calls.append(_Call(entry, name, value=_told(getattr(entry, name), value)))
            calls.append(_Call(entry, _DONE))
        kind.__setattr__(entry, name, value)

    return set_attribute


def _numbered(like: Any) -> Any:
    """Nonzero numbers that replace the model's own K or V."""
    numbers = mx.broadcast_to(mx.arange(1, like.shape[-1] + 1).astype(like.dtype), like.shape)
    mx.eval(numbers)
    return numbers


_FEW = 8
"""The most operations of a graph evaluated to inspect an assigned value; the model's own graphs are
larger.
"""


def _told(old: Any, new: Any) -> str:
    """The new value of K or V, whose previous value was ``old``."""
    if old is None or new is None or old.shape != new.shape:
        return _OTHER
    graph = io.StringIO()
    mx.export_to_dot(graph, new)
    if graph.getvalue().count("rectangle") > _FEW:
        return _OTHER
    return _KEPT if mx.array_equal(old, new) else _OTHER if mx.any(new) else _ZEROS


_MORE = 8
"""Tokens of a second pass, for growing states; few, since a model may process them one by one."""


def _shapes(entry: Any) -> list[tuple[int, ...]]:
    """The shapes of one row's states; empty for an entry without states."""
    states = entry.cache if type(entry) is mlx_caches.ArraysCache else ()
    return [() if state is None else tuple(state.shape[1:]) for state in states]


def _layer(i: int, entry: Any, calls: Sequence[_Call], first: Sequence[tuple[int, ...]]) -> Layer:
    if type(entry) is mlx_caches.ArraysCache:
        return _recurrent(i, entry, calls, first)
    if type(entry) is mlx_caches.KVCache:
        return _attention(i, entry, calls, None)
    if type(entry) is mlx_caches.ChunkedKVCache:
        return _attention(i, entry, calls, entry.chunk_size)
    alike = [call.window or 0 for call in calls if getattr(call.entry, "max_size", None) == entry.max_size]
    window = max(entry.max_size, *alike)
    return _attention(i, entry, calls, window, entry.max_size if window > entry.max_size else None)


def _attention(
    i: int, entry: Any, calls: Sequence[_Call], window: int | None, max_size: int | None = None
) -> Attention:
    own = {(call.name, call.value) for call in calls if call.entry is entry}
    keep = getattr(entry, "keep", 0)
    if entry.keys is None:
        return Attention(window, max_size=max_size, used=False, keep=keep)
    chunked = type(entry) is mlx_caches.ChunkedKVCache
    heads, key_dim, value_dim = entry.keys.shape[1], entry.keys.shape[3], entry.values.shape[3]
    dropped = ("values", _ZEROS) in own
    assigned = {call for call in own if call[0] in ("keys", "values")}
    if assigned - {("keys", _KEPT), ("values", _KEPT), ("values", _ZEROS)} or (
        dropped and value_dim and ("update_and_fetch", _ALIKE) not in own
    ):
        raise NotSupportedError(
            f"make_prompt_cache: layer {i} of the model sets K and V of its cache entry itself; use mlx-lm's "
            "own cache"
        )
    return Attention(
        window,
        heads,
        key_dim,
        value_dim,
        entry.keys.dtype,
        max_size,
        keys_only=dropped or not value_dim,
        assigned=bool(assigned),
        chunked=chunked,
        keep=keep,
    )


def _recurrent(i: int, entry: Any, calls: Sequence[_Call], first: Sequence[tuple[int, ...]]) -> Recurrent:
    states = entry.cache
    if any(state is None for state in states):
        raise NotSupportedError(
            f"make_prompt_cache: layer {i} of the model sets only some of its {len(states)} states in a "
            "pass; use mlx-lm's own cache"
        )
    shapes = _shapes(entry)
    growing = tuple(_growing(i, *pair) for pair in zip(first, shapes, strict=True))
    masked = any(call.name == "make_mask" and type(call.entry) is mlx_caches.ArraysCache for call in calls)
    reads_first = calls[0].name not in ("make_mask", "update_and_fetch")
    return Recurrent(
        tuple(shapes),
        tuple(x.dtype for x in states),
        masked,
        reads_first,
        growing if any(growing) else (),
    )


def _growing(i: int, one: tuple[int, ...], more: tuple[int, ...]) -> Growth | None:
    """How a state grew, of shape ``one`` after one token."""
    if one == more:
        return None
    axes = [axis for axis, (before, after) in enumerate(zip(one, more, strict=True)) if before != after]
    if len(axes) > 1 or one[axes[0]] != 1 or more[axes[0]] > _MORE:
        raise NotSupportedError(
            f"make_prompt_cache: layer {i} of the model has a state of {one} after one token and of {more} "
            f"after {_MORE + 1}; a state may grow by one along one axis up to {_MORE}; use mlx-lm's own cache"
        )
    return Growth(axes[0])
