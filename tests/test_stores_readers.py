"""Readers: an entry's bytes on their way to where they belong, verified with the last one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvcache.stores import (
    FileStore,
    MemoryStore,
    SnapshotCorrupt,
    StoreClosedError,
    StoreUnavailable,
    StoreValueError,
)
from kvcache.stores.protocol import ReadingStore

DATA = np.random.default_rng(5).integers(0, 256, 3_000_000, np.uint8).tobytes()
"""Several blocks of a digest, and no whole number of them."""


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    found: Any = MemoryStore() if request.param == "memory" else FileStore(tmp_path, durable=False)
    found.put("a", [DATA])
    yield found
    found.close()


def data_file(folder: Path) -> Path:
    return folder / "pages" / "a.safetensors"


@pytest.mark.parametrize(
    "sizes", [(3_000_000,), (1, 2, 2_999_997), (0, 1_500_000, 0, 1_500_000), (1000,) * 3000]
)
@pytest.mark.parametrize("at_once", [1, 2, 5000])
def test_what_was_put_comes_in_order_into_whatever_is_given(
    store: Any, sizes: tuple[int, ...], at_once: int
) -> None:
    assert isinstance(store, ReadingStore)
    reader = store.reader("a")
    assert reader is not None
    buffers = [np.zeros(size, np.uint8) for size in sizes]
    for start in range(0, len(buffers), at_once):
        assert reader.left == sum(sizes[start:])
        reader.fill(buffers[start : start + at_once])
    assert reader.left == 0
    assert b"".join(buffer.tobytes() for buffer in buffers) == DATA
    reader.close()
    reader.close()


def test_buffers_of_every_kind_are_filled(store: Any) -> None:
    reader = store.reader("a")
    halves, rest = np.zeros((10, 3), ml_dtypes.bfloat16), bytearray(len(DATA) - 60 - 7)
    reader.fill([halves, memoryview(bytearray(7)), rest])
    assert halves.tobytes() == DATA[:60]
    assert bytes(rest) == DATA[67:]


def test_what_is_not_there_has_no_reader(store: Any) -> None:
    assert store.reader("b") is None
    with pytest.raises(StoreValueError, match="the key"):
        store.reader("../b")


def test_more_than_there_is_cannot_be_read(store: Any) -> None:
    reader = store.reader("a")
    with pytest.raises(StoreValueError, match="3000001 bytes; 3000000 are left"):
        reader.fill([bytearray(1), bytearray(3_000_000)])
    with pytest.raises(StoreValueError, match="read-only"):
        reader.fill([bytes(3)])
    whole = bytearray(3_000_000)
    reader.fill([whole])  # nothing was read by what was refused
    assert bytes(whole) == DATA
    with pytest.raises(StoreValueError, match="0 are left"):
        reader.fill([bytearray(1)])


def test_a_closed_reader_gives_nothing(store: Any) -> None:
    reader = store.reader("a")
    reader.close()
    with pytest.raises(StoreValueError, match="0 are left"):
        reader.fill([bytearray(1)])


def test_a_reader_goes_on_when_its_entry_is_evicted_or_its_store_closed(store: Any) -> None:
    one, other = store.reader("a"), store.reader("a")
    buffer = bytearray(len(DATA))
    assert store.delete("a")
    one.fill([buffer])
    assert bytes(buffer) == DATA
    store.close()
    other.fill([buffer])
    with pytest.raises(StoreClosedError):
        store.reader("a")


def test_a_hit_is_a_use(tmp_path: Path) -> None:
    with FileStore(tmp_path, budget=20, durable=False) as store:
        store.put("a", [bytes(10)])
        store.put("b", [bytes(10)])
        reader = store.reader("a")
        assert reader is not None
        reader.fill([bytearray(10)])
        store.put("c", [bytes(10)])
        assert [found is None for found in store.stat(["a", "b", "c"])] == [False, True, False]


@pytest.mark.parametrize("place", [0, 600_000, 2_999_999])
def test_a_flipped_bit_is_found_with_the_last_byte(tmp_path: Path, place: int) -> None:
    with FileStore(tmp_path, durable=False) as store:
        store.put("a", [DATA])
        damaged = bytearray(DATA)
        damaged[place] ^= 1
        data_file(tmp_path).write_bytes(damaged)
        reader = store.reader("a")
        assert reader is not None
        reader.fill([bytearray(2_999_999)])
        with pytest.raises(SnapshotCorrupt, match="digest"):
            reader.fill([bytearray(1)])
        assert store.stat(["a"]) != [None]  # a reader cannot tell damage from a change on the way
        with pytest.raises(SnapshotCorrupt, match="dropped"):
            store.get_into("a", bytearray(3_000_000))
        assert store.reader("a") is None


def test_a_file_of_another_size_has_no_reader(tmp_path: Path) -> None:
    with FileStore(tmp_path, durable=False) as store:
        store.put("a", [DATA])
        os.truncate(data_file(tmp_path), 2_000_000)
        assert store.reader("a") is None


def test_a_file_that_is_cut_while_it_is_read_is_corrupt(tmp_path: Path) -> None:
    with FileStore(tmp_path, durable=False) as store:
        store.put("a", [DATA])
        reader = store.reader("a")
        assert reader is not None
        os.truncate(data_file(tmp_path), 2_000_000)
        with pytest.raises(SnapshotCorrupt, match="fewer are there"):
            reader.fill([bytearray(3_000_000)])


def test_a_device_that_fails_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, buffers: object) -> int:
        raise OSError(5, "Input/output error")

    with FileStore(tmp_path, durable=False) as store:
        store.put("a", [DATA])
        reader = store.reader("a")
        assert reader is not None
        monkeypatch.setattr(os, "readv", fail)
        with pytest.raises(StoreUnavailable, match="Input/output error"):
            reader.fill([bytearray(3_000_000)])
        monkeypatch.undo()
        assert store.get_into("a", bytearray(3_000_000))


def test_no_file_stays_open(tmp_path: Path) -> None:
    opened = Path("/proc/self/fd")
    if not opened.is_dir():
        pytest.skip("this system does not tell which files are open")
    with FileStore(tmp_path, durable=False) as store:
        store.put("a", [DATA])
        before = len([*opened.iterdir()])
        readers = [store.reader("a") for _ in range(5)]
        assert len([*opened.iterdir()]) == before + 5
        readers[0].close()  # type: ignore[union-attr]
        del readers
        assert len([*opened.iterdir()]) == before
