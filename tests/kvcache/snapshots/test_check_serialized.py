"""Pages that nobody made of a snapshot: each is refused as corrupt, or as harmless as any other.

Whatever a store has under a key, with a digest that is right, ``begin`` takes it or drops it, and goes on.
"""

from __future__ import annotations

import copy
import functools
import logging
import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ml
from kvcache.cache import InvalidRangeError
from kvcache.snapshots.check_serialized import check_serialized
from kvcache.snapshots.serialize import deserialize, serialize
from kvcache.stores import (
    MemoryStore,
    SerializedSnapshot,
    SnapshotCorruptError,
    get_snapshot,
    pack,
    put_snapshot,
    unpack,
)
from ml import DType

from ..prefix.rigs.conversing import CACHES, ConversationSetup, Rig
from ..prefix.rigs.stores import PlainStore
from ..stores.test_serialized import json_values

TOKENS = [4, *range(10, 17)]
"""The first one brings an encoder's output."""
STRANGE = (None, -1, 0, 1, 7, 2**62, 2**70, True, 1.5, "x", "F16", "F16/Q4_0", [], {}, [[1]], [0, 0, 0])
CASES = [(cache, "F32") for cache in CACHES]
CASES += [("causal", "F16/AFFINE4_32"), ("causal", "F8_E4M3/Q8_0"), ("recurrent and sliding", "Q4_0")]
every_cache = pytest.mark.parametrize(("cache", "dtype"), CASES, ids=[f"{c} {d}" for c, d in CASES])

Place = tuple[Any, ...]


def rig(backend: ml.Backend, cache: str, dtype: str, *tiers: Any) -> Rig:
    return Rig(ConversationSetup(cache, dtype=dtype), backend, None, tiers)


@functools.cache
def stored(backend: ml.Backend, cache: str, dtype: str = "F32") -> dict[str, SerializedSnapshot]:
    """The pages of a conversation by their keys, in memory of their own."""
    store = MemoryStore()
    with rig(backend, cache, dtype, store).prefix as prefix:
        owner = rig(backend, cache, dtype, store)
        owner.keep(TOKENS)
        owner.prefix.close()
        chain = prefix.tree.keys.chain(TOKENS)
        pages = {key: get_snapshot(store, key) for key in (chain.at(i) for i in range(1, len(TOKENS) + 1))}
    return {key: page for key, page in pages.items() if page is not None}


def places(meta: Any, at: Place = ()) -> Iterator[Place]:
    """The way to everything inside."""
    items = meta.items() if isinstance(meta, dict) else enumerate(meta) if isinstance(meta, list) else ()
    for key, value in items:
        yield (*at, key)
        yield from places(value, (*at, key))


def changed(page: SerializedSnapshot, where: Place, *value: Any) -> SerializedSnapshot:
    """With another value in one place of its meta; none: without what is there."""
    meta = inside = copy.deepcopy(dict(page.meta))
    for key in where[:-1]:
        inside = inside[key]
    if value:
        inside[where[-1]] = value[0]
    else:
        del inside[where[-1]]
    return SerializedSnapshot(meta, page.arrays)


def with_array(page: SerializedSnapshot, name: str, array: np.ndarray | None) -> SerializedSnapshot:
    """With another array of that name; None: without it."""
    others = {other: kept for other, kept in page.arrays.items() if other != name}
    return SerializedSnapshot(page.meta, others if array is None else {**others, name: array})


def forgeries(page: SerializedSnapshot) -> Iterator[Callable[[], SerializedSnapshot]]:
    """Each is made when it is called: there are thousands, of which some are drawn."""
    for where in places(dict(page.meta)):
        yield partial(changed, page, where)
        yield from (partial(changed, page, where, value) for value in STRANGE)
    for name, array in page.arrays.items():
        yield from (
            partial(with_array, page, name, other)
            for other in (
                None, array[:-1].copy(), array.reshape(-1), array[None], array[..., :0].copy(),
                np.array(1.0, np.float32), np.zeros(array.shape, np.int8), np.zeros(array.shape, np.float16),
                -np.ones(array.shape, array.dtype), array[::-1].copy(),
            )
        )  # fmt: skip
        yield partial(with_array, page, "another", array)
        where = next(where for where in places(dict(page.meta)) if where[-1] == "layers" or len(where) == 2)
        yield partial(with_array, changed(page, where, []), name, None)


@every_cache
def test_no_page_of_a_store_keeps_a_conversation_from_beginning(
    backend: ml.Backend, cache: str, dtype: str
) -> None:
    pages, rnd = stored(backend, cache, dtype), random.Random(1)
    forged = [(key, forge) for key, page in pages.items() for forge in forgeries(page)]
    for number, (key, forge) in enumerate(rnd.sample(forged, 40)):
        store = MemoryStore()
        for name, page in {**pages, key: forge()}.items():
            put_snapshot(store, name, page)
        r = rig(backend, cache, dtype, store if number % 2 else PlainStore(store))
        if number % 4 > 1:
            r.keep([1, 2, 3])
        for _ in range(2):
            session = r.prefix.begin([*TOKENS, 99])
            assert r.cache.offset(session.seq) == session.cached
            session.close(keep=False)
        if session.cached < len(TOKENS):
            assert None in store.stat([*pages]), "what was not taken was dropped"


@pytest.mark.parametrize("name", ["zero", None, 1.0, True, -1])
def test_a_layer_without_a_number_is_corrupt_dropped_and_a_miss(
    backend: ml.Backend, name: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ((first, page), (last, rest)) = stored(backend, "causal").items()
    for reader in (lambda store: store, PlainStore):
        store = MemoryStore()
        put_snapshot(store, first, changed(page, ("snapshot", "layers", 1, 0), name))
        put_snapshot(store, last, rest)
        r = rig(backend, "causal", DType.F32, reader(store))
        with caplog.at_level(logging.WARNING):
            assert r.keep([*TOKENS, 99]) == 0
        assert f"a layer's number is {name!r}; its content is computed again" in caplog.text
        r.prefix.flush()
        found = get_snapshot(store, first)
        assert found is not None
        assert found.meta == page.meta, "written anew"


def test_a_page_without_the_states_of_a_layer_is_dropped(backend: ml.Backend) -> None:
    store = MemoryStore()
    for key, page in stored(backend, "recurrent").items():
        name, _ = page.meta["snapshot"]["parts"][1]["states"][2][2]
        put_snapshot(store, key, with_array(changed(page, ("snapshot", "parts", 1, "states", 2)), name, None))
    r = rig(backend, "recurrent", DType.F32, store)
    r.keep([1, 2, 3])
    assert r.keep([*TOKENS, 99]) == 0


def test_a_page_with_a_gap_is_no_conversations(backend: ml.Backend) -> None:
    page = [*stored(backend, "causal").values()][-1]
    count = page.arrays["positions"].size
    arrays = {
        name: np.ascontiguousarray(array.take([0, *range(2, count)], axis=array.shape.index(count)))
        for name, array in page.arrays.items()
    }
    gap = SerializedSnapshot(page.meta, arrays)
    check_serialized("test", gap)
    with pytest.raises(SnapshotCorruptError, match=f"test: .* {count - 1} positions of"):
        check_serialized("test", gap, complete=True)


ATTENTION = [
    ({"latent": [[7, 2]]}, "layers [7] are described, and not there"),
    ({"extra": [[7, [["keys", [2]]]]]}, "layers [7] are described, and not there"),
    ({"kind": "another"}, "kind 'another'"),
    ({"begin": None}, "begin is None"),
    ({"end": -1}, "end is -1"),
    ({"whole": 1}, "whole is 1"),
    ({"keep": 1.5}, "keep is 1.5"),
    ({"dtype": 5}, "a format is 5"),
    ({"layers": 1}, "layers is 1"),
    ({"layers": [1]}, "a layer is 1, and no list of 3"),
    ({"layers": [["x", "F32", []]]}, "a layer's number is 'x'"),
    ({"layers": [[0, "I32", []]]}, "layer 0 in I32"),
    ({"layers": [[0, "F32", 1]]}, "the parts of layer 0 is 1"),
    ({"layers": [[0, "F32", [1]]]}, "a tensor is 1, and no list of 2"),
    ({"layers": [[0, "F32", [[1, []]]]]}, "an array's name is 1"),
    ({"layers": [[0, "F32", [["0.0", 1]]]]}, "the axes of 0.0 is 1"),
    ({"layers": [[0, "F32", [["0.0", ["x"]]]]]}, "an axis is 'x'"),
    ({"layers": [[0, "F32", [["positions", []]]]]}, "'positions' is there twice"),
    ({"latent": 1}, "latent is 1"),
    ({"latent": [1]}, "a latent layer is 1, and no list of 2"),
    ({"latent": [[0, "x"]]}, "a latent layer is 'x'"),
    ({"extra": 1}, "extra is 1"),
    ({"extra": [1]}, "the extras of a layer is 1, and no list of 2"),
    ({"extra": [["x", []]]}, "a layer's number is 'x'"),
    ({"extra": [[0, 1]]}, "the extras of layer 0 is 1"),
    ({"extra": [[0, [1]]]}, "an extra is 1, and no list of 2"),
    ({"extra": [[0, [[1, []]]]]}, "an extra's name is 1"),
    ({"extra": [[0, [["a", 1]]]]}, "the shape of 'a' is 1"),
    ({"extra": [[0, [["a", ["x"]]]]]}, "a size is 'x'"),
]
STATES = [
    ({"states": 1}, "states is 1"),
    ({"states": [1]}, "a state is 1, and no list of 3"),
    ({"states": [["conv", "x", 1]]}, "a state's layer is 'x'"),
]
ENCODER = [
    ({"length": None}, "length is None"),
    ({"position": "x"}, "position is 'x'"),
    ({"layers": 1}, "layers is 1"),
    ({"layers": [1]}, "a layer is 1, and no list of 2"),
    ({"layers": [["x", 1]]}, "a layer's number is 'x'"),
    ({"layers": [[0, 1]]}, "layer 0 is 1, and no list of 2"),
]


@pytest.mark.parametrize(
    ("cache", "part", "wrong", "message"),
    [
        *(("causal", (), *case) for case in ATTENTION),
        *(("recurrent", ("parts", 1), *case) for case in STATES),
        *(("encoder", ("parts", 0), *case) for case in ENCODER),
        ("wrapper", (), {"parts": 1}, "parts is 1"),
    ],
    ids=str,
)
def test_what_a_page_has_for_something_else_is_named(
    backend: ml.Backend, cache: str, part: Place, wrong: dict[str, Any], message: str
) -> None:
    page = next(iter(stored(backend, cache).values()))
    for name, value in wrong.items():
        page = changed(page, ("snapshot", *part, name), value)
    with pytest.raises(SnapshotCorruptError, match=f"test: not a serialized snapshot: {re.escape(message)}$"):
        check_serialized("test", page)


@every_cache
def test_what_is_checked_is_a_snapshot_that_the_cache_takes_or_refuses(
    backend: ml.Backend, cache: str, dtype: str
) -> None:
    page = [*stored(backend, cache, dtype).values()][-1]
    judge(backend, cache, dtype, page)
    for forge in random.Random(2).sample([*forgeries(page)], 100):
        judge(backend, cache, dtype, forge())


def judge(backend: ml.Backend, cache: str, dtype: str, page: SerializedSnapshot) -> None:
    try:
        snapshot = deserialize(backend, page)
    except SnapshotCorruptError:
        return
    assert check_serialized("test", page) == (snapshot.begin, snapshot.end)
    made = rig(backend, cache, dtype).cache
    try:
        taken = made.restore(0, snapshot)
    except InvalidRangeError:
        taken = False
    if not taken:
        assert made.offset(0) == 0


def test_a_page_of_another_kind_of_cache_is_not_taken(backend: ml.Backend) -> None:
    for kind in CACHES:
        for other in CACHES:
            page = next(iter(stored(backend, kind).values()))
            judge(backend, other, DType.F32, page)


# Anything at all.


@settings(max_examples=120, deadline=None, derandomize=True, database=None)
@given(
    data=st.data(), cache=st.sampled_from([*CACHES]), dtype=st.sampled_from(["F32", "Q8_0", "F16/AFFINE4_32"])
)
def test_any_description_is_that_of_a_snapshot_or_corrupt(
    backend: ml.Backend, data: st.DataObject, cache: str, dtype: str
) -> None:
    page = [*stored(backend, cache, dtype).values()][-1]
    for _ in range(data.draw(st.integers(1, 3))):
        where = data.draw(st.sampled_from([*places(dict(page.meta))] or [("snapshot",)]))
        page = changed(page, where, data.draw(json_values | st.sampled_from(STRANGE)))
    judge(backend, cache, dtype, page)


@settings(max_examples=120, deadline=None, derandomize=True, database=None)
@given(data=st.data(), cache=st.sampled_from([*CACHES]))
def test_any_bytes_are_a_snapshots_or_corrupt(backend: ml.Backend, data: st.DataObject, cache: str) -> None:
    packed = bytearray(b"".join(pack([*stored(backend, cache).values()][-1])))
    header = 8 + int.from_bytes(packed[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, data.draw(st.sampled_from([header, len(packed)]))))
        stop = data.draw(st.integers(start, min(start + 8, len(packed))))
        packed[start:stop] = data.draw(st.binary(max_size=8) | st.sampled_from([b"0", b"]", b'"', b"true"]))
    try:
        page = unpack(packed)
    except SnapshotCorruptError:
        return
    judge(backend, cache, DType.F32, page)


@pytest.mark.parametrize(
    "meta",
    ["x", {}, {"snapshot": None}, {"snapshot": []}, {"snapshot": {"kind": "other", "begin": 0, "end": 1}}],
    ids=repr,
)
def test_what_is_no_page_of_a_snapshot_says_so(backend: ml.Backend, meta: Any) -> None:
    with pytest.raises(SnapshotCorruptError, match="deserialize: not a serialized snapshot"):
        deserialize(backend, SerializedSnapshot(meta))


def test_a_page_nested_without_end_is_corrupt(backend: ml.Backend) -> None:
    meta: dict[str, Any] = {"kind": "wrapper", "begin": 0, "end": 0, "parts": []}
    for _ in range(5000):
        meta = {"kind": "wrapper", "begin": 0, "end": 0, "parts": [meta]}
    with pytest.raises(SnapshotCorruptError):
        deserialize(backend, SerializedSnapshot({"snapshot": meta}))


@every_cache
def test_what_a_cache_makes_is_sound(backend: ml.Backend, cache: str, dtype: str) -> None:
    for page in stored(backend, cache, dtype).values():
        begin, end = check_serialized("test", page, complete=True)
        assert 0 <= begin < end <= len(TOKENS)
    r = rig(backend, cache, dtype)
    chat = r.chat(TOKENS)
    for end in (0, len(TOKENS)):
        assert check_serialized("test", serialize(backend, r.cache.snapshot(chat.seq, 0, end))) == (0, end)
