"""mlx-lm's tests, with our entries in the places of its KVCache and RotatingKVCache, and of what it makes.

A stand-in is a prompt cache of one layer. ``make_prompt_cache`` gives ours for every model that we have
caches for.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx_lm.utils
from mlx.utils import tree_flatten
from mlx_lm.models import cache, llama
from mlx_lm.tokenizer_utils import TokenizerWrapper

from benchmarks.peers_tests import SHAPE, load, named, tokenizer
from kvcache import InvalidRangeError, NotSupportedError
from kvcache.integrations import mlx_lm as integration

LEFT_OUT: dict[str, str] = {}
"""Patterns of tests that are not run, and why."""

_used: Counter[str] = Counter()
_modules: list[ModuleType] = []
_pools: dict[Any, integration.CachePool] = {}
_models: dict[int, tuple[Any, Any]] = {}
"""The model that was asked for last, and the pool of its prompt caches."""
_make_own = cache.make_prompt_cache
_ROOM = 1 << 28


def _new_pool(layers: Any, model: Any = None, max_kv_size: int | None = None) -> integration.CachePool:
    """Room for 16 sequences of 512 tokens, or what of it is no more than 256 MiB: some models are large."""
    per_token, states = 1, 1
    for layer in (one for entry in layers for one in getattr(entry, "layers", (entry,))):
        if isinstance(layer, integration.Attention):
            per_token += 4 * (layer.kv_heads or 0) * ((layer.key_dim or 0) + (layer.value_dim or 0))
        else:
            states += sum(8 * math.prod(shape) for shape in layer.shapes)
    sequences = min(16, max(2, _ROOM // states))
    capacity = min(512, max(16, _ROOM // (per_token * sequences)))
    return integration.CachePool(
        layers if model is None else model,
        capacity=capacity,
        max_sequences=sequences,
        rollback=0,
        checkpoints=1,
        max_kv_size=max_kv_size,
    )


def _one_layer(window: Any, dtype: Any = None, shape: tuple[int, ...] = (), keep: int = 0) -> Any:
    """Rows of the one pool for all entries of a kind in a test, so that they can be merged."""
    key = (window, dtype, shape, keep)
    if key not in _pools:
        _pools[key] = _new_pool([integration.Attention(window, dtype=dtype, keep=keep)])
    return _pools[key].make_prompt_cache()[0].rows


class _StandIn(type):
    """The entries that a pool makes pass for a stand-in too."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, getattr(integration, cls.__name__))


class _OneLayer(metaclass=_StandIn):
    """A prompt cache of one layer, which goes to a pool of its shape when it is first written."""

    rows: Any
    empty: Any

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        entry: Any = super()
        if self.empty() and keys.dtype in (mx.float16, mx.bfloat16):
            self._move(keys)
        try:
            return entry.update_and_fetch(keys, values)  # type: ignore[no-any-return]
        except InvalidRangeError:
            if not self.empty():
                raise
            self._move(keys)
            return entry.update_and_fetch(keys, values)  # type: ignore[no-any-return]

    def _move(self, keys: Any) -> None:
        layer = self.rows.pool.storage.layers[0]
        dtype = keys.dtype if mx.issubdtype(keys.dtype, mx.floating) else None
        self.rows = _one_layer(layer.window, dtype, keys.shape[1::2], layer.keep)
        self._seen = 0


class KVCache(_OneLayer, integration.KVCache):
    def __init__(self, rows: Any = None, layer: int = 0, seen: int = 0) -> None:
        super().__init__(_one_layer(None) if rows is None else rows, layer, seen)
        _used["KVCache"] += 1


class RotatingKVCache(_OneLayer, integration.RotatingKVCache):
    def __init__(self, max_size: Any = None, keep: int = 0, seen: int = 0) -> None:
        _used["RotatingKVCache"] += 1
        if not isinstance(max_size, int):  # by merge, extract or deepcopy: rows, layer
            super().__init__(max_size, keep, seen)
        else:
            super().__init__(_one_layer(max_size, keep=keep), 0)


class _Batches:
    """In the place of the class of a batch: its rows are merged by themselves."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._kind(*arguments, **options)

    def merge(self, caches: Any) -> Any:
        ours = isinstance(caches[0], KVCache | RotatingKVCache)
        return (type(caches[0]) if ours else self._kind).merge(caches)


def _make_prompt_cache(model: Any, max_kv_size: int | None = None) -> list[Any]:
    if "make_cache" in vars(model) or "make_cache" in model:  # the test's own
        return model.make_cache()  # type: ignore[no-any-return]
    if hasattr(model, "make_cache"):  # for which mlx-lm does not use it
        max_kv_size = None
    large = sum(x.nbytes for _, x in tree_flatten(model.parameters())) > _ROOM
    try:
        with named(_makers(), make_prompt_cache=_make_own):  # which is asked what the model wants
            layers = integration.layers_of(model, max_kv_size)
    except NotSupportedError:
        large = True
    if large:
        # Models of many GiB, which their test describes and never evaluates; storing K and V would.
        return _make_own(model, max_kv_size)  # type: ignore[no-any-return]
    known, pool = _models.get(id(model), (None, None))
    if known is not model or list(pool.storage.entries) != list(layers):
        with named(_makers(), make_prompt_cache=_make_own):
            pool = _new_pool(layers, model, max_kv_size)
        _models.clear()
        _models[id(model)] = model, pool
    _used["make_prompt_cache"] += 1
    return pool.make_prompt_cache()  # type: ignore[no-any-return]


def _load_model(*arguments: Any, **options: Any) -> tuple[Any, Any]:
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs(model_type="llama", rms_norm_eps=1e-5, **SHAPE))
    mx.eval(model.parameters())
    return model, TokenizerWrapper(tokenizer())


def theirs() -> contextlib.AbstractContextManager[None]:
    """mlx-lm's own classes, which are in place."""
    return contextlib.nullcontext()


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """Ours in the test files, in generation and in the server."""
    _pools.clear()
    _models.clear()
    batches = {name: _Batches(getattr(cache, name)) for name in ("BatchKVCache", "BatchRotatingKVCache")}
    classes = {"KVCache": KVCache, "RotatingKVCache": RotatingKVCache, **batches}
    with (
        named([*_makers(), *_modules], make_prompt_cache=_make_prompt_cache),
        named(_modules, **classes),
    ):
        yield


def _makers() -> list[Any]:
    # Not by attribute: the package has functions of these names.
    return [cache, *map(importlib.import_module, ("mlx_lm.generate", "mlx_lm.server"))]


@contextlib.contextmanager
def prepared(paths: Sequence[Path]) -> Iterator[tuple[list[ModuleType], Counter[str]]]:
    before = mx.set_cache_limit(1 << 28)  # some of the files make a hundred models
    with named([mlx_lm.utils], load=_load_model):  # before the files import it
        _modules[:] = map(load, paths)
        yield _modules, _used
    mx.set_cache_limit(before)
