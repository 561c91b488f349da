"""FileStore's folder: what it writes and in which order, who may do what there, what does not belong."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors
import xxhash

from kvcache.stores import (
    FileStore,
    MemoryStore,
    SerializedSnapshot,
    SnapshotCorruptError,
    StoreUnavailableError,
    pack,
    unpack,
)
from kvcache.stores.entries import Entries
from kvcache.stores.manifest import Manifest
from kvcache.testing.stores import UNIT, content, fill, present, read

from .stores_rig import entries, names, posix, store, where, with_manifest

__all__ = ["store", "where"]

pytestmark = posix

# What lies in the folder.


def test_an_entry_is_its_bytes_and_behind_them_a_manifest(store: FileStore, where: Path) -> None:
    page = SerializedSnapshot({"x": 1}, {"k": np.arange(6, dtype=np.float32)})
    store.put("a", pack(page))
    data = b"".join(pack(page))
    assert names(where) == entries("a")
    manifest = Manifest("a", len(data), xxhash.xxh3_128(data).hexdigest())
    whole = (where / "pages" / "a.entry").read_bytes()
    assert whole == data + manifest.encoded()
    assert safetensors.deserialize(whole[:-512])[0][0] == "k", "without the manifest other tools read it"
    assert unpack(read(store, "a") or b"").meta == {"x": 1}


@pytest.mark.parametrize("durable", [True, False])
def test_an_entry_is_on_the_device_before_it_has_its_name(
    where: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    """A folder that is made is there first, too; without ``durable`` nothing of an entry is waited for."""
    calls: list[str] = []

    def place(fd: int) -> str:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        return "changing" if path.suffix == ".tmp" else str(path.relative_to(where.parent))

    def spy(name: str, told: Callable[..., str]) -> None:
        original = getattr(os, name)

        def call(*args: Any, **options: Any) -> Any:
            calls.append(f"{name} {told(*args)}")
            return original(*args, **options)

        monkeypatch.setattr(os, name, call)

    spy("fsync", place)
    spy("rename", lambda old, new: Path(new).suffix[1:])
    store = FileStore(where / "above" / "store", durable=durable)
    assert calls[:3] == ["fsync .", "fsync store", "fsync store/above"]
    calls.clear()
    store.put("a", [b"x"])
    store.close()
    waited = ["fsync changing", "rename entry", "fsync store/above/store/pages"]
    assert calls == (waited if durable else ["rename entry"])


def test_usage_counts_bytes_and_events(where: Path) -> None:
    with FileStore(where, 3 * UNIT) as store:
        fill(store, "xabcd")
        with_manifest(where / "pages" / "b.entry", b"{}")
        assert store.stat(["b"]) == [None]
        usage = store.usage()
    assert (usage.entries, usage.nbytes, usage.budget) == (2, 2 * UNIT, 3 * UNIT)
    assert (usage.evicted, usage.dropped, usage.swept) == (2, 1, 0)


# Other openers of the same folder.


def test_a_manifest_is_parsed_once_and_data_of_another_size_is_noticed(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []
    original = Entries.open
    monkeypatch.setattr(Entries, "open", lambda self, key: parsed.append(key) or original(self, key))
    with FileStore(where, durable=False) as store:
        fill(store, "a")
        parsed.clear()
        assert [stat and stat.nbytes for _ in range(2) for stat in store.stat(["a"])] == [UNIT, UNIT]
        assert len(parsed) <= 1
        path = where / "pages" / "a.entry"
        path.write_bytes(path.read_bytes()[1:])
        assert store.stat(["a"]) == [None]


@pytest.mark.parametrize("asked", ["get_into", "view"])
def test_an_entry_that_is_put_anew_before_a_damaged_one_is_dropped_stays(
    store: FileStore, where: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    fill(store, "a")
    path = where / "pages" / "a.entry"
    path.write_bytes(b"?" + path.read_bytes()[1:])
    with FileStore(where) as other:
        original = store._index.locked

        def locked() -> Any:
            other.delete("a")
            other.put("a", [content("b")])
            monkeypatch.undo()
            return original()

        monkeypatch.setattr(store._index, "locked", locked)
        buffer = bytearray(UNIT)
        found = store.view("a") if asked == "view" else store.get_into("a", buffer) and buffer
        assert found == content("b")
        assert store.usage().dropped == 0


def test_a_view_is_what_was_put_and_outlives_eviction_and_the_store(where: Path) -> None:
    for opened in (FileStore(where, 3 * UNIT), MemoryStore(3 * UNIT)):
        with opened as store:
            fill(store, "abc")
            view = store.view("a")
            assert view == content("a")
            fill(store, "d")
            assert present(store, "abcd") == "acd", "a view is a hit"
            if isinstance(store, FileStore):
                written = store.view("a")
                assert written is not None
                written[:10] = bytes(10)
                assert store.view("a") == content("a") == read(store, "a"), "writing does not reach the file"
            else:
                assert view is not None
                assert view.readonly
            store.delete("a")
            assert store.view("a") is None
            store.put("empty", [b""])
            assert store.view("empty") == b""
        assert view == content("a")


# Readers.

DATA = content("data", 1_500_000)


@pytest.mark.parametrize("place", [0, 600_000, 1_499_999])
def test_a_flipped_bit_is_found_with_the_last_byte(store: FileStore, where: Path, place: int) -> None:
    store.put("a", [DATA])
    path = where / "pages" / "a.entry"
    damaged = bytearray(path.read_bytes())
    damaged[place] ^= 1
    path.write_bytes(damaged)
    reader = store.reader("a")
    assert reader is not None
    reader.fill([bytearray(1_499_999)])
    with pytest.raises(SnapshotCorruptError, match="digest"):
        reader.fill([bytearray(1)])
    assert store.stat(["a"]) != [None]  # a reader cannot tell damage from a change on the way
    with pytest.raises(SnapshotCorruptError, match="dropped"):
        store.get_into("a", bytearray(1_500_000))
    assert store.reader("a") is None


def test_a_reader_of_a_file_that_is_cut_or_of_a_device_that_fails(
    store: FileStore, where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("a", [DATA])
    one, other = store.reader("a"), store.reader("a")
    assert one is not None
    assert other is not None
    with monkeypatch.context() as patched, pytest.raises(StoreUnavailableError, match="Input/output error"):
        patched.setattr(os, "readv", Mock(side_effect=OSError(5, "Input/output error")))
        one.fill([bytearray(1_500_000)])
    assert read(store, "a") == DATA
    os.truncate(where / "pages" / "a.entry", 1_000_000)
    with pytest.raises(SnapshotCorruptError, match="fewer are there"):
        other.fill([bytearray(1_500_000)])
    assert store.reader("a") is None


def test_reading_to_the_end_is_a_use(where: Path) -> None:
    with FileStore(where, 2 * UNIT) as store:
        fill(store, "ab")
        reader = store.reader("a")
        assert reader is not None
        reader.fill([bytearray(UNIT)])
        fill(store, "c")
        assert present(store, "abc") == "ac"


# Who may do what.


@pytest.fixture
def ordinary_umask() -> Any:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_made_is_its_users_alone_in_a_folder_that_others_may_enter(
    where: Path, ordinary_umask: None
) -> None:
    where.mkdir(mode=0o755)
    with FileStore(where) as store, FileStore(where / "above" / "store"):
        fill(store, "ab")
    assert [mode(path) for path in (where, where / "above", where / "above" / "store")] == [
        0o755,
        0o755,
        0o700,
    ]
    shutil.rmtree(where / "above")
    found = {str(path.relative_to(where)): mode(path) for path in where.rglob("*")}
    assert {found.pop(name) for name in ("pages", "changing", "index")} == {0o700}
    assert found.keys() >= {"kvcache.lock", "pages/a.entry", "index/entries.sqlite"}
    assert set(found.values()) == {0o600}


def test_an_entry_of_another_user_is_a_miss_and_the_others_are_served(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read everything: what it would be told is told by the call itself."""
    original = os.open

    def refuse(path: Any, *args: Any, **options: Any) -> int:
        if str(path) in ("b.entry", "c.entry"):
            raise PermissionError(13, "Permission denied")
        return original(path, *args, **options)

    with FileStore(where) as store:
        fill(store, "abc")
    with FileStore(where) as store:
        monkeypatch.setattr(os, "open", refuse)
        assert [store.get_into(key, bytearray(UNIT)) for key in "abc"] == [True, False, False]
        assert store.stat(["b"]) == [None]
        assert store.reader("c") is None
        assert store.usage().dropped == 0
        monkeypatch.undo()
        assert present(store, "abc") == "abc"


def test_a_store_without_the_budget_of_another_is_told_of(
    where: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with FileStore(where, 3 * UNIT) as limited, FileStore(where) as unlimited:
        for i in range(3):
            fill(limited, [f"a{i}"])
        assert not caplog.records
        for i in range(3):
            fill(unlimited, [f"b{i}"])
        for i in range(2):
            fill(limited, [f"c{i}"])
        assert limited.usage().nbytes == 3 * UNIT
    (told,) = caplog.messages
    assert f"holds {6 * UNIT} bytes, but the budget is {3 * UNIT}: another store writes" in told


def test_stores_that_digest_otherwise_share_a_folder_and_its_budget(where: Path) -> None:
    pytest.importorskip("blake3", reason="the package blake3 is not installed")
    keyed = {"digest": "blake3", "secret": "of the hosts"}
    with (
        FileStore(where, 4 * UNIT, durable=False) as plain,
        FileStore(where, 4 * UNIT, durable=False, **keyed) as mine,
        FileStore(where, 4 * UNIT, durable=False, digest="blake3") as unkeyed,
    ):
        for store in (plain, mine, unkeyed):
            fill(store, "a")
        fill(plain, "b")
        assert [store.usage().entries for store in (plain, mine, unkeyed)] == [4] * 3
        stems = sorted(name.removesuffix(".entry") for name in names(where))
        assert [stem.partition("-")[0] for stem in stems] == ["a", "a.blake3", "a.blake3", "b"]
        view = mine.view("a")
        for stem in stems[1:3]:
            (where / "pages" / f"{stem}.entry").write_bytes(b"forged" * 300)
        assert view == content("a"), "of a keyed store a view does not change with the file"
        fill(mine, "c")
        assert present(plain, "ab") == "b", "the oldest of all"
        plain.delete("b")
        assert unkeyed.usage().entries == 3


# What does not belong there.


@pytest.mark.parametrize("raw", [b"", b"[" * 512, b" " * 512, "of b, longer", "of c"])
@pytest.mark.parametrize("asked", ["stat", "get_into", "prefix", "put"])
def test_an_entry_with_a_bad_manifest_is_dropped_and_counted(
    store: FileStore, where: Path, raw: bytes | str, asked: str
) -> None:
    fill(store, "abc")
    if isinstance(raw, str):
        key, longer = raw[3], "longer" in raw
        raw = Manifest(key, UNIT + longer, xxhash.xxh3_128(content("b")).hexdigest()).encoded()
    with_manifest(where / "pages" / "b.entry", raw)
    if asked == "stat":
        assert present(store, "abc") == "ac"
    elif asked == "prefix":
        assert store.prefix(["a", "b", "c"]) == 1
    elif asked == "get_into":
        with pytest.raises(SnapshotCorruptError, match="b in"):
            store.get_into("b", bytearray(UNIT))
    else:
        assert store.put("b", [b"anew"]) is True
        assert read(store, "b") == b"anew"
        store.delete("b")
    assert names(where) == entries("a", "c")
    usage = store.usage()
    assert (usage.dropped, usage.entries, usage.nbytes) == (1, 2, 2 * UNIT)


def test_what_cannot_be_an_entry_is_cleared_away_when_the_folder_is_opened(where: Path) -> None:
    with FileStore(where) as store:
        fill(store, "abc")
    (where / "pages" / "a.entry").write_bytes(bytes(511))
    (where / "pages" / "b.entry").unlink()
    os.mkfifo(where / "pages" / "d.entry")
    with FileStore(where) as store:
        usage = store.usage()
        assert (usage.entries, usage.dropped, usage.swept) == (1, 2, 0)
        assert names(where) == entries("c")


def test_what_a_dead_writer_left_is_swept_and_what_a_living_one_writes_is_not(
    store: FileStore, where: Path
) -> None:
    with store._index.locked():
        living, fd = store._folder.create("living", UNIT)
    (where / "changing" / f"dead.{'0' * 32}.tmp").write_bytes(b"left behind")
    (where / "changing" / f"link.{'0' * 32}.tmp").symlink_to("nowhere")
    for left, swept in (([living], 2), ([], 1)):
        with FileStore(where) as other:
            assert other.usage().swept == swept
            assert names(where) == left
        if left:
            os.close(fd)


def test_names_that_are_no_entries_are_left_alone(where: Path) -> None:
    FileStore(where).close()
    others = ["README", "Model.safetensors", "a.b.entry", "UPPER.entry", "note.txt", ".hidden.tmp"]
    for name in others:
        (where / "pages" / name).write_text("mine")
    with FileStore(where, 1) as store:
        store.put("a", [b"x"])
        store.put("b", [b"x"])
    assert names(where) == sorted([*others, *entries("b")])


@pytest.mark.parametrize(
    ("name", "data"),
    [("model.safetensors", b"precious"), ("kvcache.lock", b"something else"),
     ("kvcache.lock", b"kvcache.store/1\n" + bytes(40))],
)  # fmt: skip
def test_a_folder_that_holds_something_else_is_refused_and_untouched(
    where: Path, name: str, data: bytes
) -> None:
    where.mkdir()
    (where / name).write_bytes(data)
    with pytest.raises(
        StoreUnavailableError, match=r"version" if name == "kvcache.lock" else r"model\.safetensors"
    ):
        FileStore(where)
    assert [path.name for path in where.iterdir()] == [name]
    assert (where / name).read_bytes() == data


def test_a_folder_whose_first_opener_died_at_once_is_taken_over(where: Path) -> None:
    where.mkdir()
    (where / "kvcache.lock").touch()
    with FileStore(where) as store:
        assert store.put("a", [b"x"])


def test_a_link_is_never_followed(where: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    with FileStore(where) as store:
        fill(store, "ab")
        inside = where / "pages" / "b.entry"
        shutil.copy(inside, outside)
        before = outside.read_bytes(), outside.stat().st_mtime_ns
        inside.unlink()
        inside.symlink_to(outside)
        assert store.stat(["b"]) == [None]
        inside.symlink_to(outside)
        with contextlib.suppress(SnapshotCorruptError):
            assert store.get_into("b", bytearray(UNIT)) is False
        assert store.put("b", [b"anew"]) is True
        assert read(store, "b") == b"anew"
        assert not inside.is_symlink()
    assert (outside.read_bytes(), outside.stat().st_mtime_ns) == before
    (where / "pages").rename(tmp_path / "elsewhere")
    (where / "pages").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreUnavailableError):
        FileStore(where)


def test_a_pipe_in_place_of_an_entry_does_not_block(store: FileStore, where: Path) -> None:
    os.mkfifo(where / "pages" / "a.entry")
    assert store.stat(["a"]) == [None]
    assert names(where) == []
