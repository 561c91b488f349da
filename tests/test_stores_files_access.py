"""Who may do what in FileStore's folder: its user alone reads it; who has no secret forges no keyed entry."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from kvcache.stores import (
    FileStore,
    SnapshotCorrupt,
    SnapshotStore,
    StoreUnavailable,
    StoreValueError,
    open_store,
)
from kvcache.testing import StoreTests
from kvcache.testing.stores import UNIT, content, fill, present, read

from .file_store_rig import posix, where

__all__ = ["where"]

pytestmark = posix


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def ordinary_umask() -> Any:
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_what_is_made_is_its_users_alone_in_a_folder_that_others_may_enter(
    where: Path, ordinary_umask: None
) -> None:
    where.mkdir(mode=0o755)
    with FileStore(where) as store:
        fill(store, "ab")
    found = {str(path.relative_to(where)): mode(path) for path in where.rglob("*")}
    assert {found.pop(name) for name in ("pages", "writing", "index")} == {0o700}
    assert found.keys() >= {"kvcache.lock", "pages/a.json", "pages/a.safetensors", "index/entries.sqlite"}
    assert set(found.values()) == {0o600}
    assert mode(where) == 0o755, "a folder that was there is left as it is"


def test_a_folder_that_is_made_is_its_users_alone_and_those_above_it_are_ordinary(
    where: Path, ordinary_umask: None
) -> None:
    with FileStore(where / "above" / "store"):
        assert mode(where / "above" / "store") == 0o700
        assert mode(where / "above") == 0o755


def test_the_names_of_folders_that_are_made_are_on_the_device_before_anything_is_put(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    original = os.fsync

    def fsync(fd: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        original(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with FileStore(where / "above" / "store"):
        pass
    assert synced[:3] == [str(where.parent), str(where), str(where / "above")]
    synced.clear()
    with FileStore(where / "above" / "store"):
        assert synced == []


def test_an_entry_of_another_user_is_a_miss_and_the_others_are_served(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read everything: what it would be told is told by the call itself."""
    original = os.open

    def refuse(path: Any, *args: Any, **options: Any) -> int:
        if str(path) in ("b.json", "c.safetensors"):
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


# Keyed digests.


def keyed(where: Path, secret: str | None = "of the hosts", **options: Any) -> FileStore:
    pytest.importorskip("blake3", reason="the package blake3 is not installed")
    return FileStore(where, durable=False, digest="blake3", secret=secret, **options)


def file_of(store: FileStore, key: str, suffix: str = ".safetensors") -> Path:
    return store.path / "pages" / (store._naming.stem(key) + suffix)


class TestKeyedFileStore(StoreTests):
    persistent = True

    def make(self, folder: Path, budget: int | None = None) -> SnapshotStore:
        return keyed(folder / "store", budget=budget)

    def damage(self, store: SnapshotStore, folder: Path, key: str) -> bool:
        (path,) = (folder / "store" / "pages").glob(f"{key}.blake3-*.safetensors")
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0x10
        path.write_bytes(data)
        return True


@pytest.mark.parametrize("forged", [(".json", ".safetensors"), (".safetensors",)], ids=["all", "data"])
@pytest.mark.parametrize("secret", ["a guess", None], ids=["another secret", "none"])
def test_who_does_not_know_the_secret_can_forge_nothing(
    where: Path, forged: tuple[str, ...], secret: str | None
) -> None:
    with keyed(where) as mine, keyed(where, secret) as others:
        fill(mine, "a")
        assert others.stat(["a"]) == [None]
        others.put("a", [content("forged")])
        assert (read(mine, "a"), read(others, "a")) == (content("a"), content("forged"))
        for suffix in forged:
            file_of(others, "a", suffix).rename(file_of(mine, "a", suffix))
        with pytest.raises(SnapshotCorrupt, match="digest"):
            mine.get_into("a", bytearray(UNIT))
        assert mine.stat(["a"]) == [None]


def test_the_entry_of_one_key_is_not_that_of_another(where: Path) -> None:
    with keyed(where) as store:
        fill(store, "ab")
        for suffix in (".json", ".safetensors"):
            a, b = (file_of(store, key, suffix) for key in "ab")
            b.write_bytes(a.read_bytes().replace(b'"key":"a"', b'"key":"b"'))
        with pytest.raises(SnapshotCorrupt, match="digest"):
            store.get_into("b", bytearray(UNIT))


def test_a_view_of_a_keyed_store_does_not_change_with_the_file(where: Path) -> None:
    with keyed(where) as store:
        fill(store, "a")
        view = store.view("a")
        file_of(store, "a").write_bytes(b"forged" * 200)
        assert view == content("a")


def test_stores_that_digest_otherwise_share_a_folder_and_its_budget(where: Path) -> None:
    with (
        FileStore(where, 4 * UNIT, durable=False) as plain,
        keyed(where, budget=4 * UNIT) as mine,
        keyed(where, None, budget=4 * UNIT) as unkeyed,
    ):
        for store in (plain, mine, unkeyed):
            fill(store, "a")
        fill(plain, "b")
        assert [store.usage().entries for store in (plain, mine, unkeyed)] == [4] * 3
        assert file_of(plain, "a").name == "a.safetensors"
        assert file_of(unkeyed, "a").name == "a.blake3.safetensors"
        assert file_of(mine, "a").name.startswith("a.blake3-")
        fill(mine, "c")
        assert present(plain, "ab") == "b", "the oldest of all"
        plain.delete("b")
        assert unkeyed.usage().entries == 3


@pytest.mark.parametrize(
    "options",
    [
        {"digest": "md5"},
        {"digest": None},
        {"secret": "s"},
        *({"digest": "blake3", "secret": s} for s in ("", 3)),
    ],
    ids=str,
)
def test_a_digest_that_makes_no_sense_is_refused(where: Path, options: dict[str, Any]) -> None:
    with pytest.raises(StoreValueError, match=r"FileStore: .*(digest|secret)"):
        FileStore(where, **options)
    assert not where.exists()


def test_a_secret_comes_with_the_url_and_is_not_shown(where: Path) -> None:
    pytest.importorskip("blake3", reason="the package blake3 is not installed")
    with open_store(f"file://{where}?digest=blake3&secret=hunter2") as store:  # type: ignore[attr-defined]
        store.put("a", [b"x"])
        assert "hunter2" not in repr(store)
    with open_store("file", path=where, digest="blake3", secret="hunter2") as store:  # type: ignore[attr-defined]
        assert present(store, "a") == "a"
    with pytest.raises(StoreValueError) as caught:
        open_store(f"file://{where}?secret=hunter2")
    assert "hunter2" not in str(caught.value)


def test_a_missing_blake3_names_the_extra(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "blake3", None)
    with pytest.raises(StoreUnavailable, match=r"blake3.*ml-kvcache\[disk\]"):
        FileStore(where, digest="blake3")
    assert not where.exists()
