"""What each layer of an mlx-lm model stores, found by asking the model.

A model says which caches it wants (``make_cache``), and one pass over a single token shows the shapes:
MLX is lazy, so that the pass builds a graph, is read for its shapes, and is thrown away unevaluated.
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

__all__ = ["Attention", "Layer", "Recurrent", "Several", "entries_in", "flat", "layers_of", "wanted_by"]

mlx_caches: Any = cache
"""``mlx_lm.models.cache``, which is typed in parts only."""
OwnKVCache: Any = cache.KVCache
OwnRotatingKVCache: Any = cache.RotatingKVCache
OwnChunkedKVCache: Any = cache.ChunkedKVCache
OwnArraysCache: Any = cache.ArraysCache
OwnCacheList: Any = cache.CacheList


@dataclass(frozen=True, slots=True)
class Attention:
    """A layer with K and V.

    ``window``: a query sees itself and the ``window - 1`` tokens before it; None: all of the past. Shapes
    that are None become known with the first K and V.
    """

    window: int | None = None
    kv_heads: int | None = None
    key_dim: int | None = None
    value_dim: int | None = None
    dtype: Any = None
    """MLX's dtype of K and V as the model computes them."""
    max_size: int | None = None
    """That of mlx-lm's RotatingKVCache, where the model's masks look further back than it; else None."""
    used: bool = True
    """Whether the model reads and writes the entry that it wants for the layer."""
    keys_only: bool = False
    """Whether K is stored alone: the values are the first ``value_dim`` numbers of it, which nobody reads."""
    assigned: bool = False
    """Whether the model sets K and V of the entry anew, to what they are or to zeros that nobody reads."""
    chunked: bool = False
    """Whether a query sees its own chunk of ``window`` positions only, by a mask that the model makes."""
    keep: int = 0
    """How many of the first tokens are among the ``window`` that a query sees, and stay for good."""


@dataclass(frozen=True, slots=True)
class Growth:
    """How a state grows along ``axis`` with a row's tokens: by one number ``every`` so many of them.

    ``rest``: it has the tokens that do not make up ``every`` as yet, and starts anew with each that does.
    """

    axis: int
    every: int = 1
    rest: bool = False

    def size(self, full: int, tokens: int) -> int:
        """The state's size along ``axis`` after so many tokens, ``full`` at most."""
        return tokens % self.every if self.rest else min(full, tokens // self.every)


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A layer with states of fixed size, as many as there are ``shapes``: those of one row."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    masked: bool = True
    """Whether the model asks which columns of a pass are tokens, and which padding."""
    reads_first: bool = False
    """Whether the model reads the states before it says of how many tokens a pass is."""
    growing: tuple[Growth | None, ...] = ()
    """How each state grows until it has its size; None: it has it from the start."""
    names: tuple[str, ...] = ()
    """What the model calls the states of its entry; (): it numbers them."""
    capacity: int | None = None
    """For how many tokens of a row there is room in states that grow; None: for any number."""


Layer = Attention | Recurrent


@dataclass(frozen=True, slots=True)
class Several:
    """An entry of several caches, mlx-lm's CacheList: a layer with attention beside states, or twice."""

    layers: tuple[Layer, ...]


def flat(entries: Iterable[Layer | Several]) -> list[Layer]:
    """What all entries store, one after another."""
    several = (entry.layers if isinstance(entry, Several) else (entry,) for entry in entries)
    return [layer for layers in several for layer in layers]


def entries_in(prompt_cache: Iterable[Any]) -> list[Any]:
    """The entries of a prompt cache of ours or of mlx-lm's, those inside others in their place."""
    inner = (entry.caches if isinstance(entry, OwnCacheList) else (entry,) for entry in prompt_cache)
    return [entry for entries in inner for entry in entries]


def layers_of(model: Any, max_kv_size: int | None = None, capacity: int = 4096) -> list[Layer | Several]:
    """The layers of ``model``, in the order of its prompt cache.

    ``max_kv_size`` as mlx-lm's ``make_prompt_cache`` takes it: layers see the first 4 tokens, which stay for
    good, and the last ``max_kv_size - 4``. ``capacity`` is for how many tokens there is room
    in states that grow with the text.

    Raises NotSupportedError for a layer that needs a kind of cache that there is none of here, and for a
    model that goes about its prompt cache in a way that ours cannot follow.
    """
    for part in model.modules() if hasattr(model, "modules") else ():
        if getattr(part, "pipeline_size", 1) > 1:
            raise NotSupportedError(
                f"make_prompt_cache: a pipeline over {part.pipeline_size} processes, whose model writes into "
                "its last entry what it waits for; use mlx-lm's own cache"
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
    found: list[Layer | Several] = []
    for i, entry in enumerate(wanted):
        layers = [_layer(i, inner, calls, first[id(inner)]) for inner in entries_in([entry])]
        found.append(Several(tuple(layers)) if type(entry) is mlx_caches.CacheList else layers[0])
    return found


KEEP = 4
"""The first tokens that mlx-lm's ``max_kv_size`` keeps."""


def wanted_by(model: Any, max_kv_size: int | None = None) -> list[Any]:
    """An empty prompt cache of mlx-lm's."""
    make = getattr(type(model), "make_cache", None)  # not the instance's: it may be ours already
    if max_kv_size is None:
        return list(make(model)) if make is not None else [mlx_caches.KVCache() for _ in model.layers]
    check_whole("make_prompt_cache", "max_kv_size", max_kv_size, least=KEEP + 1)
    if make is not None:
        raise NotSupportedError(
            f"make_prompt_cache: max_kv_size={max_kv_size}; this model says itself what its layers keep "
            "(make_cache), and mlx-lm does not use max_kv_size for such a model. Leave it out, and limit "
            "memory by capacity="
        )
    return [mlx_caches.RotatingKVCache(max_size=max_kv_size, keep=KEEP) for _ in model.layers]


_COMPRESSED = "mlx_lm.models.deepseek_v41"
"""Whose entries have a class of their own: a window, a latent for each group of tokens, and an open group."""


def is_compressed(entry: Any) -> bool:
    """Whether this is an entry of mlx-lm's deepseek_v41."""
    return type(entry).__name__ == "LayerCache" and type(entry).__module__ == _COMPRESSED


def compressed_layers(model: Any, wanted: Sequence[Any], capacity: int) -> list[Recurrent]:
    """The layers of a deepseek_v41 whose empty entries ``wanted`` are."""
    parts = [layer.self_attn for layer in model.layers]
    every = [max(1, part.ratio) if part.is_kv_source else 0 for part in parts]
    model(mx.zeros((1, max(every) or 1), mx.int32), cache=wanted)  # MLX is lazy: nothing is computed
    found = []
    for entry, one in zip(wanted, every, strict=True):
        grown = {"window": (entry.window_size, Growth(0))}
        if one:
            grown |= dict.fromkeys(("compress_kv", "index_k"), (max(1, capacity // one), Growth(0, one)))
            grown |= dict.fromkeys(("pending_kv", "pending_gate"), (one - 1, Growth(0, one, rest=True)))
        states = {name: state for name in grown if (state := getattr(entry, name)) is not None}
        shapes = tuple((grown[name][0], state.shape[2]) for name, state in states.items())
        dtypes = tuple(state.dtype for state in states.values())
        growing = tuple(grown[name][1] for name in states)
        found.append(
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
    return found


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
    """What a model asked of one of its entries, by the method's name."""

    entry: Any
    name: str
    window: int | None = None
    told: str = ""
    """Of K and V that are set: what to; of those put: whether they are one array."""


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
    """Notes K and V that the model sets by itself, when no method of the entry is at work."""

    def set_attribute(entry: Any, name: str, value: Any) -> None:
        if name in ("keys", "values") and (not calls or calls[-1].name == _DONE):
            calls.append(_Call(entry, name, told=_told(getattr(entry, name), value)))
            calls.append(_Call(entry, _DONE))
        kind.__setattr__(entry, name, value)

    return set_attribute


def _numbered(like: Any) -> Any:
    """Computed numbers, none of them 0, in the place of what the model would compute."""
    found = mx.broadcast_to(mx.arange(1, like.shape[-1] + 1).astype(like.dtype), like.shape)
    mx.eval(found)
    return found


_FEW = 8
"""Operations of a graph that is computed to see what the model sets: not those of the model."""


def _told(old: Any, new: Any) -> str:
    """What K or V is set to, which were ``old``."""
    if old is None or new is None or old.shape != new.shape:
        return _OTHER
    graph = io.StringIO()
    mx.export_to_dot(graph, new)
    if graph.getvalue().count("rectangle") > _FEW:
        return _OTHER
    return _KEPT if mx.array_equal(old, new) else _OTHER if mx.any(new) else _ZEROS


_MORE = 8
"""Tokens of a second pass, for states that grow: few, for a model may go through them one by one."""


def _shapes(entry: Any) -> list[tuple[int, ...]]:
    """Those of one row's states; none of an entry without states."""
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
    own = {(call.name, call.told) for call in calls if call.entry is entry}
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
