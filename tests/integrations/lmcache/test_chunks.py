"""Chunks like LMCache's as entries of stores, how they are named, and the connector's options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache import InvalidRangeError
from kvcache.integrations.lmcache.chunks import ChunkShape, ConnectorOptions, identity_of_model
from kvcache.stores import (
    MemoryStore,
    SerializedSnapshot,
    SnapshotCorruptError,
    UnknownModelError,
    get_snapshot,
    put_snapshot,
)

SHAPE = ChunkShape("KV_2LTD", ((2, 3, 8, 4), (2, 1, 8, 2)), ("bfloat16", "float16"))


def test_a_chunk_comes_back_with_its_shapes_and_dtypes() -> None:
    store, data = MemoryStore(), np.arange(256, dtype=np.uint8)
    put_snapshot(store, "a", SHAPE.pack(data))
    found = get_snapshot(store, "a")
    assert found is not None
    shape, back = ChunkShape.unpack(found)
    assert shape == SHAPE
    assert np.array_equal(back, data)


@pytest.mark.parametrize(
    ("meta", "array"),
    [
        ({}, np.zeros(4, np.uint8)),
        ({"lmcache_chunk": {"form": "x", "shapes": [4], "dtypes": ["float16"]}}, np.zeros(4, np.uint8)),
        ({"lmcache_chunk": {"form": "x", "shapes": [[2]], "dtypes": []}}, np.zeros(4, np.uint8)),
        ({"lmcache_chunk": {"form": "x", "shapes": [[2]], "dtypes": ["float16"]}}, np.zeros(2, np.float16)),
        *(
            (
                {"lmcache_chunk": {"form": "x", "shapes": shapes, "dtypes": ["int8"] * 2}},
                np.zeros(4, np.uint8),
            )
            for shapes in ([[1 << 40], [1]], [[3], [2]], [[-1], [1]], [[-2, -2], [0]])
        ),
    ],
    ids=[
        "nothing",
        "a shape that is none",
        "fewer dtypes",
        "no bytes",
        "far more bytes",
        "more bytes in all",
        "fewer than none",
        "negative sizes",
    ],
)
def test_anything_else_under_a_chunks_key_is_corrupt(meta: dict[str, Any], array: np.ndarray) -> None:
    with pytest.raises(SnapshotCorruptError, match="chunk of LMCache"):
        ChunkShape.unpack(SerializedSnapshot(meta, {"0": array}))


def test_a_model_is_named_by_its_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = identity_of_model(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"Weights")
    assert identity_of_model(str(tmp_path)) != before
    with pytest.raises(UnknownModelError, match="no local files identify the weights of 'nowhere/none'"):
        identity_of_model("nowhere/none")


def test_only_options_of_ours_are_read() -> None:
    found = ConnectorOptions.parse(
        {"kvcache.store": "memory:", "kvcache.threads": 3, "save_chunk_meta": False}
    )
    assert (found.store, found.threads, found.identity) == (("memory:",), 3, None)
    for wrong, told in (
        ({"kvcache.stores": "memory:"}, "'kvcache.stores' is not an option"),
        ({"store": "memory:"}, "kvcache.store=None"),
        ({"kvcache.store": "memory:", "kvcache.threads": True}, "threads=True; it must be at least 1"),
    ):
        with pytest.raises(InvalidRangeError, match=told):
            ConnectorOptions.parse(wrong)
