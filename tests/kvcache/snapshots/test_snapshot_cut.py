"""A page that is cut in host memory is what a snapshot that is cut on the device is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ml
from kvcache import Batch, CausalCache, deserialize, serialize
from kvcache.snapshots.cut import cut_serialized, join_serialized
from kvcache.snapshots.serialize import serialized_nbytes
from kvcache.stores import SerializedSnapshot
from kvcache.stores.errors import SnapshotCorruptError

from ..prefix.rigs.conversing import CACHES, DIVISIBLE, ConversationSetup, Rig

TOKENS = [0, 1, 2, 3, b"a picture", 5, 6, 7, 8]
LAYOUTS = {
    "as the backend asks": None,
    "token major": ml.CacheConfig(layout=ml.Layout.TOKEN_MAJOR),
    "permuted v": ml.CacheConfig(permuted_v=True),
}


def taken(backend: ml.Backend, setup: ConversationSetup, begin: int = 0) -> tuple[Rig, Any]:
    r = Rig(setup, backend)
    chat = r.chat(TOKENS)
    return r, r.cache.snapshot(chat.seq, begin, len(TOKENS))


def content(page: SerializedSnapshot) -> dict[str, Any]:
    """Arrays by name with their axes in the order of the snapshot; and all else."""

    def ordered(value: Any) -> Any:
        if (
            isinstance(value, list)
            and len(value) == 2
            and isinstance(value[0], str)
            and value[0] in page.arrays
        ):
            name, axes = value
            return page.arrays[name].transpose([axes.index(i) for i in range(len(axes))]).tobytes()
        if isinstance(value, dict):
            return {name: ordered(entry) for name, entry in value.items()}
        return [ordered(entry) for entry in value] if isinstance(value, list) else value

    positions = {name: array.tolist() for name, array in page.arrays.items() if name.endswith("positions")}
    return {"meta": ordered(dict(page.meta)), "positions": positions, "names": sorted(page.arrays)}


@pytest.mark.parametrize("dtype", ["F32", "BF16", "Q8_0/AFFINE4_32"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cache", DIVISIBLE)
def test_cutting_a_page_is_cutting_its_snapshot(
    backend: ml.Backend, cache: str, layout: str, dtype: str
) -> None:
    r, snapshot = taken(backend, ConversationSetup(cache, dtype=dtype, config=LAYOUTS[layout]), 1)
    page = serialize(backend, snapshot)
    assert page.nbytes == serialized_nbytes(snapshot)
    for at in range(2, len(TOKENS)):
        pages = cut_serialized(page, at)
        for cut, part in zip(pages, r.cache.split(snapshot, at), strict=True):
            assert content(cut) == content(serialize(backend, part))
            assert deserialize(backend, cut).nbytes == part.nbytes
        assert sum(cut.nbytes for cut in pages) == page.nbytes
        for one, other in zip(pages, cut_serialized(page, at, own=True), strict=True):
            assert content(one) == content(other)
            for name, array in other.arrays.items():
                assert array is page.arrays[name] or not np.shares_memory(array, page.arrays[name])


def test_parts_of_parts_restore_the_whole(backend: ml.Backend) -> None:
    r, snapshot = taken(backend, ConversationSetup("encoder"))
    rest, parts = serialize(backend, snapshot), []
    for at in (2, 4, 5, 8):
        first, rest = cut_serialized(rest, at)
        parts.append(first)
    for part in (*parts, rest):
        assert r.cache.restore(1, deserialize(backend, part))
    r.evaluate(1, TOKENS, [9, 10])


@pytest.mark.parametrize("cache", ["sliding", "recurrent", "wrapper"])
def test_what_is_whole_is_not_cut(backend: ml.Backend, cache: str) -> None:
    _, snapshot = taken(backend, ConversationSetup(cache))
    assert serialize(backend, snapshot).nbytes == serialized_nbytes(snapshot)
    with pytest.raises(SnapshotCorruptError, match="cut_serialized"):
        cut_serialized(serialize(backend, snapshot), 4)


def test_what_is_no_page_of_a_snapshot_is_corrupt(backend: ml.Backend) -> None:
    _, snapshot = taken(backend, ConversationSetup())
    page = serialize(backend, snapshot)
    arrays = {name: array for name, array in page.arrays.items() if not name.endswith("positions")}
    for wrong, at in ((page, 0), (page, 9), (SerializedSnapshot(), 4), (replace(page, arrays=arrays), 4)):
        with pytest.raises(SnapshotCorruptError, match=f"at {at}"):
            cut_serialized(wrong, at)
    strange = SerializedSnapshot(
        {"snapshot": {"kind": "strange", "begin": 0, "end": 9}}, {"a": np.zeros(3, np.float32)}
    )
    with pytest.raises(SnapshotCorruptError, match="strange"):
        cut_serialized(strange, 4)


def test_a_half_without_tokens_has_neither_latents_nor_extras(backend: ml.Backend) -> None:
    cache = CausalCache()
    cache.init(backend, ml.DType.F32, 1, 16, 8)
    with backend.new_context() as ctx:
        cache.start_forward(ctx, Batch(range(6), [0] * 6))
        new = ctx.zeros((6, 1, 3), ml.DType.F32)
        cache.put(ctx, new, v_dim=2, extra={"keys": ctx.zeros((6, 2), ml.DType.F32)})
        cache.evict(0, [0, 1, 2])
        first, second = cut_serialized(serialize(backend, cache.snapshot(0)), 2)
        assert [deserialize(backend, half).end for half in (first, second)] == [2, 6]


@pytest.mark.parametrize("dtype", ["F32", "Q8_0/AFFINE4_32"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cache", CACHES)
def test_joining_pages_is_joining_their_snapshots(
    backend: ml.Backend, cache: str, layout: str, dtype: str
) -> None:
    r = Rig(ConversationSetup(cache, dtype=dtype, config=LAYOUTS[layout]), backend)
    parts, pages = [], []
    for begin, end in ((0, 3), (3, 5), (5, 8), (8, 9)):  # the second one has the item, the last one one token
        r.evaluate(0, TOKENS[:begin], TOKENS[begin:end])
        parts.append(r.cache.snapshot(0, begin, end))
        pages.append(serialize(backend, parts[-1]))
    joined = join_serialized(pages)
    assert content(joined) == content(serialize(backend, r.cache.join(parts)))
    assert r.cache.restore(1, deserialize(backend, joined))
    r.evaluate(1, TOKENS, [99])


@pytest.mark.parametrize("cache", ["causal", "wrapper", "recurrent", "encoder"])
def test_pages_that_do_not_follow_one_another_or_differ_are_not_joined(
    backend: ml.Backend, cache: str
) -> None:
    r = Rig(ConversationSetup(cache), backend)
    pages = []
    for begin, end in ((0, 3), (3, 5), (5, 9)):
        r.evaluate(0, TOKENS[:begin], TOKENS[begin:end])
        pages.append(serialize(backend, r.cache.snapshot(0, begin, end)))
    other = Rig(ConversationSetup("chunked" if cache != "encoder" else "sliding"), backend)
    other.evaluate(0, [], TOKENS)
    for parts in (pages[::2], pages[::-1], [pages[0], serialize(backend, other.cache.snapshot(0, 0, 9))]):
        with pytest.raises(SnapshotCorruptError, match="join_serialized"):
            join_serialized(parts)
