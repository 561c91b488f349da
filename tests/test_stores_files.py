"""FileStore's folder: what it writes and in which order, who else opens it, and what is shown in place."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import xxhash

from kvcache.stores import (
    FileStore,
    MemoryStore,
    SerializedSnapshot,
    StoreValueError,
    pack,
    unpack,
)
from kvcache.testing.stores import UNIT, content, fill, present, read

from .file_store_rig import both, names, posix, store, where

__all__ = ["store", "where"]

pytestmark = posix

# What lies in the folder.


def test_an_entry_is_its_bytes_and_a_manifest(store: FileStore, where: Path) -> None:
    store.put("a", [b"one", b"two"])
    assert names(where) == both("a")
    assert (where / "pages" / "a.safetensors").read_bytes() == b"onetwo"
    assert json.loads((where / "pages" / "a.json").read_text()) == {
        "format": "kvcache.entry/1",
        "key": "a",
        "nbytes": 6,
        "xxh3_128": xxhash.xxh3_128(b"onetwo").hexdigest(),
    }


def test_a_page_on_disk_is_opened_by_safetensors(store: FileStore, where: Path) -> None:
    page = SerializedSnapshot({"x": 1}, {"k": np.arange(6, dtype=np.float32)})
    store.put("a", pack(page))
    with safetensors.safe_open(where / "pages" / "a.safetensors", framework="numpy") as file:
        assert file.get_tensor("k").tolist() == [0, 1, 2, 3, 4, 5]
    assert unpack(read(store, "a") or b"").meta == {"x": 1}


def test_the_data_are_on_the_device_before_the_manifest_names_them(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(where, durable=True)
    calls: list[str] = []
    known: dict[int, str] = {}

    def spy(name: str, told: Callable[..., str]) -> None:
        original = getattr(os, name)

        def call(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            calls.append(f"{name} {told(result, *args)}")
            return result

        monkeypatch.setattr(os, name, call)

    def opened(fd: int, path: str, *args: Any) -> str:
        known[fd] = "data" if "data" not in known.values() else "manifest"
        return known[fd]

    original_open = os.open

    def watched_open(path: Any, *args: Any, **options: Any) -> int:
        fd = original_open(path, *args, **options)
        if str(path).endswith(".tmp"):
            opened(fd, str(path))
        return fd

    monkeypatch.setattr(os, "open", watched_open)
    spy("fsync", lambda _, fd: known.get(fd, "folder"))
    spy("rename", lambda _, old, new: new.rpartition(".")[2])
    store.put("a", [b"x"])
    store.close()
    assert calls == [
        "fsync data", "fsync manifest", "rename safetensors", "fsync folder", "rename json", "fsync folder"
    ]  # fmt: skip


def test_without_durable_nothing_waits_for_the_device(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", None)
    assert store.put("a", [b"x"]) is True


def test_usage_counts_bytes_and_events(where: Path) -> None:
    with FileStore(where, 3 * UNIT) as store:
        fill(store, "abcd")
        (where / "pages" / "b.json").write_text("{}")
        assert store.stat(["b"]) == [None]
        usage = store.usage()
    assert (usage.entries, usage.nbytes, usage.budget) == (2, 2 * UNIT, 3 * UNIT)
    assert (usage.evicted, usage.dropped, usage.swept) == (1, 1, 0)


@pytest.mark.parametrize("budget", [-1, 1.5, "1", True])
def test_a_budget_is_a_count_of_bytes(where: Path, budget: Any) -> None:
    for make in (lambda: FileStore(where, budget), lambda: MemoryStore(budget)):
        with pytest.raises(StoreValueError, match="budget"):
            make()


# Other openers of the same folder.


def test_another_opener_sees_what_is_put_and_deleted(store: FileStore, where: Path) -> None:
    with FileStore(where) as other:
        fill(store, "ab")
        assert read(other, "a") == content("a")
        assert other.put("a", [b"other"]) is False
        other.delete("a")
        assert present(store, "ab") == "b"
        assert other.usage() == store.usage()


def test_eviction_goes_by_the_use_that_all_openers_made(where: Path) -> None:
    with FileStore(where, 4 * UNIT) as one, FileStore(where, 4 * UNIT) as other:
        fill(one, "ab")
        fill(other, "cd")
        assert read(other, "a") == content("a")
        assert one.prefix(["b"]) == 1
        fill(one, "ef")
        assert present(other, "abcdef") == "abef"
        assert one.usage().nbytes == other.usage().nbytes == 4 * UNIT


def test_an_entry_evicted_and_put_again_while_it_is_read_is_no_damage(
    store: FileStore, where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the reader's look at the manifest and its reading of the data, another one takes its place."""
    fill(store, "a")
    with FileStore(where) as other:

        def replace() -> None:
            other.delete("a")
            other.put("a", [content("b")])
            monkeypatch.undo()

        before_the_data_are_opened(store, monkeypatch, replace)
        buffer = bytearray(UNIT)
        assert store.get_into("a", buffer) is True
        assert buffer == content("b")
        assert store.usage().dropped == 0


@pytest.mark.parametrize(
    "call",
    [lambda store: store.get_into("a", bytearray(UNIT)), lambda store: store.view("a")],
    ids=["get_into", "view"],
)
def test_an_entry_that_vanishes_while_it_is_read_is_a_miss(
    store: FileStore, where: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[FileStore], object]
) -> None:
    fill(store, "a")
    with FileStore(where) as other:
        before_the_data_are_opened(store, monkeypatch, lambda: other.delete("a"))
        assert not call(store)
        assert store.usage().dropped == 0


def before_the_data_are_opened(
    store: FileStore, patch: pytest.MonkeyPatch, act: Callable[[], object]
) -> None:
    """``act()`` when the manifest has been read, and the data not yet."""
    original = store._folder.open_file

    def open_file(name: str) -> int:
        if name == "a.safetensors":
            act()
        return original(name)

    patch.setattr(store._folder, "open_file", open_file)


# What is shown in place.


def test_a_view_is_what_was_put_and_outlives_eviction_and_the_store(where: Path) -> None:
    with FileStore(where, 3 * UNIT) as store:
        fill(store, "abc")
        view = store.view("a")
        assert view == content("a")
        fill(store, "d")
        assert present(store, "abcd") == "acd", "a view is a hit"
        store.delete("a")
        assert store.view("a") is None
        store.put("empty", [b""])
        assert store.view("empty") == b""
    assert view == content("a")


def test_writing_into_a_view_does_not_reach_the_file(store: FileStore) -> None:
    fill(store, "a")
    view = store.view("a")
    assert view is not None
    view[:10] = bytes(10)
    assert read(store, "a") == content("a")
    assert store.view("a") == content("a")


def test_a_view_of_a_memory_store_copies_nothing_and_outlives_eviction() -> None:
    store = MemoryStore(2 * UNIT)
    fill(store, "ab")
    view = store.view("a")
    assert view is not None
    assert view.readonly
    fill(store, "c")
    assert present(store, "abc") == "ac"
    fill(store, "d")
    assert view == content("a")
    assert store.view("a") is None
