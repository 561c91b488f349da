"""A page is of one model's layers: whatever its key and digest say, one of other layers is never served."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcache
import ml
from kvcache import Batch, CacheDType, PrefixCache, PrefixOptions
from kvcache.snapshots.layer_shapes import check_layers, layers_of_cache, layers_of_serialized
from kvcache.storage.layer_shape import LayerShape
from kvcache.stores import FileStore, SerializedSnapshot, SnapshotCorruptError, get_snapshot, put_snapshot
from kvcache_engine.language_model import cache_for
from kvcache_engine.loading import load_model
from ml import DType

from ...rigs.small_models import KINDS as MODELS

HEADS, DIM, WIDE = 2, 64, 32
TOKENS = [*range(1, 21)]
LAYERS = dict.fromkeys(range(3), LayerShape((HEADS, DIM), (HEADS, WIDE)))

KINDS: dict[str, Callable[[], Any]] = {
    "causal": kvcache.CausalCache,
    "sliding": lambda: kvcache.SlidingWindowCache(3),
    "recurrent": lambda: kvcache.RecurrentCache((2, 3), (2, 2, 2)),
    "wrapper": lambda: kvcache.WrapperCache(kvcache.SlidingWindowCache(4), kvcache.CausalCache()),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_dtype = pytest.mark.parametrize("dtype", ["F16", "Q8_0", "F16/Q4_0", "AFFINE4_32/F8_E4M3"])


def make(backend: ml.Backend, kind: str, dtype: CacheDType = DType.F32) -> Any:
    cache = KINDS[kind]()
    cache.init(backend, dtype, 2, 32, 32)
    return cache


def evaluate(cache: Any, seq: int, begin: int, tokens: Sequence[int]) -> None:
    with cache.backend.new_context() as ctx:
        cache.start_forward(ctx, Batch(range(begin, begin + len(tokens)), [seq] * len(tokens)))
        for layer in LAYERS:
            if type(cache) is kvcache.WrapperCache:
                cache.set_layer_type(min(layer, 1))
            cache.set_layer(layer)
            rows = np.array(tokens, np.float32)[:, None, None] + np.zeros((1, HEADS, DIM), np.float32)
            cache.put(ctx, ctx.from_numpy(rows), ctx.from_numpy(rows[..., :WIDE] * (layer + 2)))
        if isinstance(cache, kvcache.RecurrentCache):
            for name in ("conv", "recurrent"):
                state = getattr(cache, f"{name}_state")(ctx, 3)
                getattr(cache, f"set_{name}_state")(ctx, 3, state)


def over(cache: Any, store: FileStore, **options: Any) -> PrefixCache:
    given = PrefixOptions(**options)
    return PrefixCache(cache, tiers=[store], identity={"model": "a"}, block_size=8, options=given)


def talk(prefix: PrefixCache) -> int:
    """How many of the tokens were there."""
    with prefix.begin([*TOKENS, 99]) as session:
        for chunk in session.chunks(32):
            at = prefix.cache.offset(session.seq)
            evaluate(prefix.cache, session.seq, at, chunk)
        return session.cached


def parts_of(meta: Any) -> list[Any]:
    """What of a page may have layers."""
    return [*meta.get("parts", ()), *([meta["attention"]] if "attention" in meta else ()), meta]


def lacking(meta: Any, arrays: dict[str, np.ndarray]) -> None:
    """Take the last layer out, wherever it is."""
    for part in parts_of(meta):
        for entry in [entry for entry in part.get("layers", ()) if entry[0] == max(LAYERS)]:
            part["layers"].remove(entry)
            for name, _ in entry[2]:
                del arrays[name]


def strange(meta: Any, arrays: dict[str, np.ndarray]) -> None:
    """Add a layer that the model has not."""
    part = next(part for part in parts_of(meta) if part.get("layers"))
    _, activations, tensors = part["layers"][0]
    part["layers"].append([7, activations, [[f"more.{name}", axes] for name, axes in tensors]])
    arrays.update({f"more.{name}": arrays[name].copy() for name, _ in tensors})


def narrow(meta: Any, arrays: dict[str, np.ndarray]) -> None:
    """Leave one of two heads in the last layer's keys and values."""
    for part in parts_of(meta):
        for i, _, tensors in part.get("layers", ()):
            for name, axes in tensors if i == max(LAYERS) else ():
                arrays[name] = np.ascontiguousarray(arrays[name].take([0], axis=axes.index(1)))


def empty(meta: Any, arrays: dict[str, np.ndarray]) -> None:
    """Leave no layer at all."""
    for part in parts_of(meta):
        for _, _, tensors in part.get("layers", ()):
            for name, _ in tensors:
                del arrays[name]
        if "layers" in part:
            part["layers"] = []


FORGERIES = pytest.mark.parametrize("forge", [lacking, strange, narrow, empty], ids=lambda f: f.__name__)


def forged(store: FileStore, folder: Path, forge: Callable[[Any, dict[str, np.ndarray]], None]) -> int:
    """Put every page anew under its key, with a digest that is right; how many."""
    keys = [path.stem for path in (folder / "pages").glob("*.entry")]
    for key in keys:
        page = get_snapshot(store, key)
        assert page is not None
        meta, arrays = dict(page.meta), dict(page.arrays)
        forge(meta["snapshot"], arrays)
        assert store.delete(key)
        assert put_snapshot(store, key, SerializedSnapshot(meta, arrays))
    return len(keys)


@every_dtype
@every_kind
def test_the_layers_of_a_cache_are_those_of_its_pages(backend: ml.Backend, kind: str, dtype: str) -> None:
    cache = make(backend, kind, dtype)
    assert layers_of_cache(cache) == {}
    evaluate(cache, 0, 0, TOKENS)
    assert layers_of_cache(cache) == LAYERS
    page = kvcache.serialize(backend, cache.snapshot(0))
    assert layers_of_serialized(page) == LAYERS
    check_layers(page, LAYERS)
    check_layers(page, {})
    wide = LayerShape((HEADS, DIM), (HEADS, DIM))
    for other in ({0: LAYERS[0]}, {**LAYERS, 3: LAYERS[0]}, {**LAYERS, 2: wide}):
        with pytest.raises(SnapshotCorruptError, match="the cache stores"):
            check_layers(page, other)
    check_layers(kvcache.serialize(backend, cache.snapshot(0, 0, 0)), LAYERS)  # of nothing


@FORGERIES
@pytest.mark.parametrize("used", [False, True], ids=["a new cache", "a cache in use"])
@every_kind
def test_a_page_of_other_layers_is_dropped_and_computed_again(
    backend: ml.Backend,
    tmp_path: Path,
    kind: str,
    used: bool,
    forge: Callable[[Any, dict[str, np.ndarray]], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A cache in use knows its layers; a new one is told by whoever knows the model."""
    with FileStore(tmp_path, durable=False) as store:
        with over(make(backend, kind), store) as prefix:
            talk(prefix)
        cache = make(backend, kind)
        assert forged(store, tmp_path, forge)
        with caplog.at_level(logging.WARNING), over(cache, store, layers=None if used else LAYERS) as prefix:
            if used:
                with prefix.begin([5, 6]) as session:
                    evaluate(cache, session.seq, 0, [5])
            assert talk(prefix) == 0
            assert "its content is computed again" in caplog.text
            assert layers_of_cache(cache) == LAYERS
        assert store.usage().entries
        with over(make(backend, kind), store, layers=LAYERS) as prefix:
            assert talk(prefix) > 0


def test_pages_of_one_conversation_have_the_same_layers(backend: ml.Backend, tmp_path: Path) -> None:
    """Also where nobody said which: those of the first page hold for the others."""
    with FileStore(tmp_path, durable=False) as store:
        with over(make(backend, "causal"), store) as prefix:
            talk(prefix)
            chain = prefix.tree.keys.chain(TOKENS)
        page = get_snapshot(store, chain.at(16))
        assert page is not None
        meta, arrays = dict(page.meta), dict(page.arrays)
        lacking(meta["snapshot"], arrays)
        store.delete(chain.at(16))
        put_snapshot(store, chain.at(16), SerializedSnapshot(meta, arrays))
        with over(make(backend, "causal"), store) as prefix:
            assert talk(prefix) == 8


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_a_model_says_which_layers_it_stores(
    make_model: Callable[..., Path], backend: ml.Backend, kind: str
) -> None:
    model = load_model(make_model(**MODELS[kind]), backend)
    cache: Any = cache_for(model)
    cache.init(backend, DType.F32, 1, 16, 16)
    with backend.new_context() as ctx:
        batch = Batch([0, 1], [0, 0], inputs=[1, 2], outputs=[1])
        cache.start_forward(ctx, batch)
        model.forward(ctx, batch, cache)
    assert layers_of_cache(cache) == model.config.cached_layers
