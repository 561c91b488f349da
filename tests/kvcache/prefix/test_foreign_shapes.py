"""Entries of a store that tell of other layers than the model has: a miss, and never an error for good."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ml
from kvcache import (
    Batch,
    CausalCache,
    InvalidRangeError,
    KVCacheError,
    PrefixCache,
    PrefixOptions,
    WrapperCache,
)
from kvcache.stores import FileStore, MemoryStore, SerializedSnapshot, get_snapshot, put_snapshot
from ml import DeviceError

from ..stores.stores_rig import posix

LAYERS = (0, 1)
PROMPT, OTHER = list(range(40)), [900, 901, 902]
SHAPES = dict.fromkeys(LAYERS, ((2, 4), (2, 4)))
Change = Callable[[list[Any], dict[str, np.ndarray]], Any]


def wide(layers: list[Any], arrays: dict[str, np.ndarray]) -> None:
    for _, _, tensors in layers:
        for name, _ in tensors:
            arrays[name] = np.zeros((*arrays[name].shape[:-1], 6), np.float32)


def endless(layers: list[Any], arrays: dict[str, np.ndarray]) -> None:
    """So that no system has the memory for all cells of a cache."""
    for _, _, tensors in layers:
        for name, axes in tensors:
            shape = [8, 1 << 15, 1] if axes[0] == 0 else [1 << 15, 8, 1]
            arrays[name] = np.zeros(shape, np.float32)


def renumbered(layers: list[Any], arrays: dict[str, np.ndarray]) -> None:
    for layer in layers:
        layer[0] += 7


def one_more(layers: list[Any], arrays: dict[str, np.ndarray]) -> None:
    layers.append([7, layers[0][1], [[f"7.{n}", axes] for n, (_, axes) in enumerate(layers[0][2])]])
    for n, (name, _) in enumerate(layers[0][2]):
        arrays[f"7.{n}"] = arrays[name]


def one_less(layers: list[Any], arrays: dict[str, np.ndarray]) -> None:
    for name, _ in layers.pop()[2]:
        del arrays[name]


FOREIGN: dict[str, Change] = {
    "wider": wide, "other layers": renumbered, "a layer more": one_more, "a layer less": one_less,
}  # fmt: skip


class Talking:
    """A model of two layers over a new cache, plain or in a wrapper, and a store that outlives it."""

    def __init__(self, store: Any, wrapped: bool, **options: Any) -> None:
        self.backend = ml.open_backend("numpy")
        self.inner = CausalCache()
        self.cache: Any = WrapperCache(self.inner) if wrapped else self.inner
        self.cache.init(self.backend, ml.DType.F32, 2, 4096, 64)
        self.prefix = PrefixCache(
            self.cache, tiers=[store], identity={"m": 1}, block_size=8, options=PrefixOptions(**options)
        )

    def ask(self, tokens: list[int]) -> int | None:
        """How many tokens were cached; None where the pass was refused."""
        try:
            with self.prefix.begin(tokens) as session:
                at, count = session.cached, len(tokens) - session.cached
                self._pass(session.seq, at, count)
                return at
        except KVCacheError:
            return None

    def _pass(self, seq: int, at: int, count: int) -> None:
        with self.backend.new_context() as ctx:
            self.cache.start_forward(ctx, Batch(range(at, at + count), [seq] * count))
            for layer in LAYERS:
                self.cache.set_layer(layer)
                key = ctx.from_numpy(np.full((count, 2, 4), layer + 1, np.float32))
                self.cache.put(ctx, key, key)
                np.testing.assert_allclose(self.cache.attend(ctx, key, 0.5).to_numpy(), layer + 1, rtol=1e-5)


def forge(store: MemoryStore | FileStore, keys: list[str], change: Change) -> None:
    """Put other content, well formed and with a right digest, under the keys."""
    for key in keys:
        page = get_snapshot(store, key)
        if page is None:
            continue
        meta, arrays = copy.deepcopy(dict(page.meta)), dict(page.arrays)
        for part in meta["snapshot"].get("parts", [meta["snapshot"]]):
            change(part["layers"], arrays)
        assert store.delete(key)
        assert put_snapshot(store, key, SerializedSnapshot(meta, arrays))


def restarted(store: Any, wrapped: bool) -> int | None:
    """What a process finds of the prompt that is started anew."""
    talking = Talking(store, wrapped)
    found = talking.ask(PROMPT)
    talking.prefix.close()
    return found


@pytest.fixture(params=["memory", pytest.param("file", marks=posix)])
def store(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    return MemoryStore() if request.param == "memory" else FileStore(tmp_path / "store", durable=False)


def forged(store: Any, change: Change, wrapped: bool) -> None:
    talking = Talking(store, wrapped)
    assert talking.ask(PROMPT) == 0
    chain = talking.prefix.tree.keys.chain(np.arange(40))
    talking.prefix.close()
    forge(store, [chain.at(end) for end in range(1, 41)], change)


@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "wrapped"])
@pytest.mark.parametrize("change", FOREIGN.values(), ids=FOREIGN)
def test_an_unused_cache_recovers_from_entries_of_other_layers(
    store: Any, change: Change, wrapped: bool
) -> None:
    """One pass may be refused: nothing but the entry could say which layers there are."""
    forged(store, change, wrapped)
    talking = Talking(store, wrapped)
    talking.ask(PROMPT)
    assert [talking.ask(OTHER), talking.ask(OTHER)] == [0, 2]
    assert [talking.ask(PROMPT), talking.ask(PROMPT)] == [0, 39]
    assert talking.inner.nbytes == 2 * 4096 * len(LAYERS) * 2 * (2 * 4) * 4, "no buffers but the model's"
    talking.prefix.close()
    found: list[Any] = [restarted(store, wrapped) for _ in range(5)]
    assert (found, found[-1]) == (sorted(found), 39), "whoever meets an entry of others writes it anew"


@pytest.mark.parametrize("change", FOREIGN.values(), ids=FOREIGN)
def test_with_layers_entries_of_others_are_misses_from_the_start(store: Any, change: Change) -> None:
    forged(store, change, wrapped=False)
    talking = Talking(store, False, layers=SHAPES)
    assert [talking.ask(PROMPT), talking.ask(PROMPT)] == [0, 39]


def test_a_session_without_a_pass_or_with_one_that_failed_loses_no_entry(store: Any) -> None:
    talking = Talking(store, False)
    assert talking.ask(PROMPT) == 0
    talking.prefix.close()
    talking = Talking(store, False)
    for _ in range(2):
        with talking.prefix.begin(PROMPT) as session:
            assert session.cached == 39
    with pytest.raises(InvalidRangeError), talking.prefix.begin(PROMPT) as session:
        talking._pass(session.seq, 39, 1)
        raise InvalidRangeError("the model fails")
    assert talking.ask(PROMPT) == 39


def test_entries_that_no_device_has_room_for_are_misses(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unused cache would make buffers of their sizes for all its cells."""
    forged(store, endless, wrapped=False)
    talking = Talking(store, False)

    def allocate(self: Any, make: Any, shape: Any, dtype: ml.DType) -> Any:
        if int(np.prod(shape)) * dtype.itemsize > 1 << 28:
            raise DeviceError("allocate: no memory")
        return whole(self, make, shape, dtype)

    context: Any = type(talking.backend.new_context())
    whole = context._allocate
    monkeypatch.setattr(context, "_allocate", allocate)
    assert [talking.ask(PROMPT), talking.ask(PROMPT)] == [0, 39]
