"""Damage and strangers in FileStore's folder: dropped, never served, never followed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from kvcache.stores import (
    FileStore,
    SnapshotCorrupt,
    StoreUnavailable,
)
from kvcache.testing.stores import UNIT, content, fill, present, read

from .file_store_rig import both, names, posix, store, where

__all__ = ["store", "where"]

pytestmark = posix


def manifest(**changes: Any) -> bytes:
    digest = xxhash.xxh3_128(content("b")).hexdigest()
    fields = {"format": "kvcache.entry/1", "key": "b", "nbytes": UNIT, "xxh3_128": digest}
    return json.dumps({key: value for key, value in {**fields, **changes}.items() if value != "-"}).encode()


MANIFESTS = {
    "empty": b"",
    "no JSON": b"nonsense",
    "no UTF-8": b"\xff\xfe",
    "deep": b"[" * 4000,
    "long": b" " * 5000 + manifest(),
    "no object": b"[]",
    "of another format": manifest(format="kvcache.entry/2"),
    "of another key": manifest(key="c"),
    "without a size": manifest(nbytes="-"),
    "without a digest": manifest(xxh3_128="-"),
    "with a further field": manifest(x=1),
    "of another size": manifest(nbytes=UNIT - 1),
    "of a negative size": manifest(nbytes=-1),
    "of a size that is a bool": manifest(nbytes=True),
    "of a size that is text": manifest(nbytes="1000"),
    "cut short": manifest()[:-3],
}


@pytest.mark.parametrize("data", MANIFESTS.values(), ids=list(MANIFESTS))
@pytest.mark.parametrize("asked", ["stat", "get_into", "prefix", "put"])
def test_an_entry_with_a_bad_manifest_is_dropped_and_counted(
    store: FileStore, where: Path, data: bytes, asked: str
) -> None:
    fill(store, "abc")
    (where / "pages" / "b.json").write_bytes(data)
    if asked == "stat":
        assert present(store, "abc") == "ac"
    elif asked == "prefix":
        assert store.prefix(["a", "b", "c"]) == 1
    elif asked == "get_into":
        with pytest.raises(SnapshotCorrupt, match="b in"):
            store.get_into("b", bytearray(UNIT))
    else:
        assert store.put("b", [b"anew"]) is True
        assert read(store, "b") == b"anew"
        store.delete("b")
    assert names(where) == both("a", "c")
    usage = store.usage()
    assert (usage.dropped, usage.entries, usage.nbytes) == (1, 2, 2 * UNIT)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut short": lambda data: data[:-1],
    "longer": lambda data: data + b"x",
    "one bit at the start": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "one bit at the end": lambda data: data[:-1] + bytes([data[-1] ^ 0x80]),
    "two parts exchanged": lambda data: data[500:] + data[:500],
    "zeros": lambda data: bytes(len(data)),
}


def damaged(store: FileStore, where: Path, damage: Callable[[bytes], bytes]) -> None:
    """Three entries, and the data of the second are damaged."""
    fill(store, "abc")
    path = where / "pages" / "b.safetensors"
    path.write_bytes(damage(path.read_bytes()))


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_damaged_data_are_never_served(
    store: FileStore, where: Path, damage: Callable[[bytes], bytes]
) -> None:
    damaged(store, where, damage)
    with pytest.raises(SnapshotCorrupt, match="dropped"):
        store.get_into("b", bytearray(UNIT))
    assert store.stat(["b"]) == [None]
    assert store.get_into("b", bytearray(UNIT)) is False
    assert names(where) == both("a", "c")
    assert store.put("b", [content("b")]) is True
    assert [read(store, key) for key in "abc"] == [content(key) for key in "abc"]
    assert store.usage().dropped == 1


def test_halves_of_entries_are_cleared_away_when_the_folder_is_opened(where: Path) -> None:
    with FileStore(where) as store:
        fill(store, "abc")
    (where / "pages" / "a.safetensors").unlink()
    (where / "pages" / "b.json").unlink()
    with FileStore(where) as store:
        usage = store.usage()
        assert (usage.entries, usage.dropped, usage.swept) == (1, 1, 1)
        assert names(where) == both("c")


@pytest.mark.parametrize("folder", ["writing", "pages"])
def test_what_a_dead_writer_left_is_swept_and_what_a_living_one_writes_is_not(
    store: FileStore, where: Path, folder: str
) -> None:
    """Among the entries is where earlier versions wrote."""
    with store._folder.locked():
        living, fd = store._folder.create_temporary()
    (where / folder / f"{'0' * 32}.tmp").write_bytes(b"left behind")
    with FileStore(where) as other:
        assert other.usage().swept == 1
        assert names(where) == [living]
    os.close(fd)
    with FileStore(where) as other:
        assert other.usage().swept == 1
        assert names(where) == []


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_damaged_data_are_never_shown(
    store: FileStore, where: Path, damage: Callable[[bytes], bytes]
) -> None:
    damaged(store, where, damage)
    with pytest.raises(SnapshotCorrupt, match="dropped"):
        store.view("b")
    assert store.view("b") is None
    assert names(where) == both("a", "c")
    assert store.usage().dropped == 1


# Strangers.


def test_names_that_are_no_entries_are_left_alone(where: Path) -> None:
    FileStore(where).close()
    strangers = ["README", "Model.safetensors", "a.b.json", "UPPER.json", "note.txt", ".hidden.tmp"]
    for name in strangers:
        (where / "pages" / name).write_text("mine")
    with FileStore(where, 1) as store:
        store.put("a", [b"x"])
        store.put("b", [b"x"])
    assert names(where) == sorted([*strangers, *both("b")])


def test_a_folder_that_holds_something_else_is_refused_and_untouched(where: Path) -> None:
    where.mkdir()
    (where / "model.safetensors").write_text("precious")
    with pytest.raises(StoreUnavailable, match=r"model\.safetensors"):
        FileStore(where)
    assert [path.name for path in where.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("data", [b"something else", b"kvcache.store/2\n" + bytes(8)])
def test_a_folder_of_another_version_is_refused(where: Path, data: bytes) -> None:
    where.mkdir()
    (where / "kvcache.lock").write_bytes(data)
    with pytest.raises(StoreUnavailable, match="version"):
        FileStore(where)


def test_a_folder_whose_first_opener_died_at_once_is_taken_over(where: Path) -> None:
    where.mkdir()
    (where / "kvcache.lock").touch()
    with FileStore(where) as store:
        assert store.put("a", [b"x"])


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_a_link_is_never_followed(where: Path, tmp_path: Path, suffix: str) -> None:
    outside = tmp_path / "outside"
    with FileStore(where) as store:
        fill(store, "ab")
        inside = where / "pages" / f"b{suffix}"
        shutil.copy(inside, outside)
        before = outside.read_bytes(), outside.stat().st_mtime_ns
        inside.unlink()
        inside.symlink_to(outside)
        assert store.stat(["b"]) == [None]
        inside.symlink_to(outside)
        with contextlib.suppress(SnapshotCorrupt):
            assert store.get_into("b", bytearray(UNIT)) is False
        assert store.put("b", [b"anew"]) is True
        assert read(store, "b") == b"anew"
        assert not inside.is_symlink()
    assert (outside.read_bytes(), outside.stat().st_mtime_ns) == before


def test_a_linked_folder_of_pages_is_refused(where: Path, tmp_path: Path) -> None:
    FileStore(where).close()
    (where / "pages").rename(tmp_path / "elsewhere")
    (where / "pages").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreUnavailable):
        FileStore(where)


def test_a_pipe_in_place_of_an_entry_does_not_block(store: FileStore, where: Path) -> None:
    os.mkfifo(where / "pages" / "a.json")
    assert store.stat(["a"]) == [None]
    assert names(where) == []
