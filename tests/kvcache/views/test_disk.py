"""Pictures of what lies on disk, and the command ``kvcache inspect``."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import ml
from kvcache import CausalCache, EncoderCache, RecurrentCache, SlidingWindowCache, WrapperCache, serialize
from kvcache.prefix.prefix_cache import PrefixCache
from kvcache.stores import SerializedSnapshot, SnapshotCorruptError, StoreUnavailableError, pack
from kvcache.views.disk import look_at_page, look_at_store
from kvcache.views.pictures import PagePart
from kvcache_engine.loading import bundled_model

from .views_rig import bound, talk

pytest.importorskip("xxhash")
pytest.importorskip("typer")
from typer.testing import CliRunner

import kvcache_engine.command.main
from kvcache.stores.file import FileStore

CELL = 32
Make = Callable[..., Path]


def stored(path: Path, backend: ml.Backend, **options: Any) -> Path:
    """A store with three pages: [0, 4), [4, 6) and [0, 3)."""
    with FileStore(path, **options) as files:
        cache = bound(CausalCache(), backend)
        with PrefixCache(cache, tiers=[files], identity={"model": "test"}, block_size=4) as prefix:
            talk(prefix, backend, [1, 2, 3, 4, 5, 6]).close()
            talk(prefix, backend, [7, 8, 9]).close()
    return path


@pytest.fixture
def folder(tmp_path: Path, numpy_backend: ml.Backend) -> Path:
    return stored(tmp_path / "store", numpy_backend)


def listing(path: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for file in sorted(path.rglob("*")):
        status = file.stat()
        found[str(file)] = status.st_mtime_ns, status.st_size
    return found


def write(path: Path, page: SerializedSnapshot) -> Path:
    path.write_bytes(b"".join(pack(page)))
    return path


# Stores.


def test_a_store_shows_its_entries_and_is_left_as_it_is(folder: Path) -> None:
    before = listing(folder)
    picture = look_at_store(folder, budget=1 << 20)
    assert sorted((entry.begin, entry.end, entry.kind) for entry in picture.entries) == [
        (0, 3, "attention"), (0, 4, "attention"), (4, 6, "attention"),
    ]  # fmt: skip
    assert before == listing(folder)
    with FileStore(folder) as files:
        usage = files.usage()
    assert (picture.total, picture.nbytes) == (usage.entries, usage.nbytes)
    assert picture.summary().startswith("3 entries, ")
    assert " of 1.0 MiB" in picture.summary()
    assert all(0 <= entry.age < 3600 and not entry.problem for entry in picture.entries)


def test_the_entries_used_last_come_first(folder: Path) -> None:
    files = sorted((folder / "pages").glob("*.entry"))
    for age, path in zip((300, 100, 200), files, strict=True):
        used = path.stat().st_mtime - age
        os.utime(path, (used, used))
    picture = look_at_store(folder, entries=2)
    assert [entry.key for entry in picture.entries] == [files[1].stem, files[2].stem]
    assert [round(entry.age, -2) for entry in picture.entries] == [100, 200]
    assert picture.total == 3
    assert picture.text().splitlines()[-1] == "  ... 1 more"


def test_broken_entries_say_what_is_wrong_and_stay(folder: Path) -> None:
    pages = folder / "pages"
    cut, short, damaged = sorted(pages.glob("*.entry"))
    cut.write_bytes(cut.read_bytes()[:100])
    short.write_bytes(short.read_bytes()[:-1])
    damaged.write_bytes(b"x" * 8 + damaged.read_bytes()[8:])
    (pages / "foreign.entry").write_bytes(b"x" * 88 + b"{}".ljust(512))
    (pages.with_name("changing") / f"a.{'a' * 32}.tmp").write_bytes(b"half")
    before = listing(folder)
    picture = look_at_store(folder)
    problems = {entry.key: entry.problem for entry in picture.entries}
    assert problems[cut.stem] == "its manifest has 100 bytes of 512"
    assert problems[short.stem].startswith("its manifest is not strict JSON")
    assert problems[damaged.stem] == "its digest is wrong"
    assert "other fields" in problems["foreign"]
    assert picture.writing == 1
    for width in (40, 80):
        words = " ".join(picture.text(width).split())
        assert "1 temporary file" in words
        assert all(problem in words for problem in problems.values()), "nothing of a reason is cut off"
    assert before == listing(folder)


def test_an_entry_that_is_evicted_while_the_folder_is_read_is_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, scandir = min((folder / "pages").glob("*.entry")).stem, os.scandir

    @contextlib.contextmanager
    def evicting(path: Path) -> Iterator[Iterator[os.DirEntry[str]]]:
        with scandir(path) as found:
            listed = list(found)
        (folder / "pages" / f"{gone}.entry").unlink()
        yield iter(listed)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", evicting)
        picture = look_at_store(folder)
    assert picture.total == len(picture.entries) == 2
    assert not any(entry.key == gone or entry.problem for entry in picture.entries)


def flip(path: Path, at: int) -> None:
    """One bit, and no date: nobody is told."""
    data, status = bytearray(path.read_bytes()), path.stat()
    data[at] ^= 1 << at % 8
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_flipped_bit_anywhere_in_an_entry_is_told(folder: Path) -> None:
    entries = sorted((folder / "pages").glob("*.entry"))
    assert not any(entry.problem for entry in look_at_store(folder).entries)
    size = entries[0].stat().st_size
    for at in (*range(0, size, size // 20), size - 1):
        flip(entries[0], at)
        picture = look_at_store(folder)
        problems = {entry.key: entry.problem for entry in picture.entries}
        assert [key for key, problem in problems.items() if problem] == [entries[0].stem], at
        assert ", 1 broken" in picture.summary()
        with pytest.raises(SnapshotCorruptError, match="damaged"):
            look_at_page(entries[0])
        flip(entries[0], at)
    flip(entries[0], size - 513)
    assert "its digest is wrong" in run(folder).stdout
    assert run(folder, "--nodes", 0).exit_code == 0


def test_a_keyed_digest_is_said_to_be_unchecked_and_one_without_a_key_is_checked(
    tmp_path: Path, numpy_backend: ml.Backend
) -> None:
    pytest.importorskip("blake3")
    stored(tmp_path / "keyed", numpy_backend, digest="blake3", secret="of the hosts")
    stored(tmp_path / "open", numpy_backend, digest="blake3")
    note = "digest not checked without the key"
    for name, notes, checked in (("keyed", {note}, "not checked without the key"), ("open", {""}, "holds")):
        picture = look_at_store(tmp_path / name)
        assert {(entry.problem, entry.note) for entry in picture.entries} == {("", text) for text in notes}
        assert (f"; {note}: 3 entries\n" in run(tmp_path / name).stdout) == (name == "keyed")
        data = sorted((tmp_path / name / "pages").glob("*.entry"))
        assert dict(look_at_page(data[0]).facts)["digest"].startswith(checked)
        flip(data[0], data[0].stat().st_size - 513)
        problems = [entry.problem for entry in look_at_store(tmp_path / name).entries if entry.problem]
        assert problems == ["its digest is wrong"] * (name == "open")
        data[1].write_bytes(data[1].read_bytes()[1:])
        problems = [entry.problem for entry in look_at_store(tmp_path / name).entries]
        assert sum("bytes were put" in problem for problem in problems) == 1, "sizes need no key"


def test_what_is_looked_into_is_told_to_a_bar(folder: Path) -> None:
    told: list[tuple[int, int]] = []
    picture = look_at_store(folder, progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (picture.nbytes, picture.nbytes)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_a_folder_that_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailableError, match="is not a store"):
        look_at_store(tmp_path)
    with pytest.raises(StoreUnavailableError, match="is not a store"):
        look_at_store(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


# Pages.


def test_a_page_shows_layers_dtype_and_bytes(tmp_path: Path, numpy_backend: ml.Backend) -> None:
    cache = bound(CausalCache(), numpy_backend, stored={0: 6})
    page = serialize(numpy_backend, cache.snapshot(0, 2, 6))
    meta = {**page.meta, "tokens": [5, 6, 7], "model": {"name": "tiny\x1b[0m"}}
    picture = look_at_page(write(tmp_path / "page.kv", SerializedSnapshot(meta, page.arrays)))
    assert (picture.begin, picture.end, picture.tokens) == (2, 6, 3)
    assert picture.parts == (PagePart("attention", 4, 1, "F32", 4 * CELL),)
    assert picture.nbytes == (tmp_path / "page.kv").stat().st_size
    nothing = "none: whether the file is complete cannot be checked"
    assert dict(picture.facts) == {"begins": "5 6 7", "model": r"{'name': 'tiny\x1b[0m'}", "digest": nothing}
    decoded = look_at_page(tmp_path / "page.kv", lambda ids: "".join(map(chr, ids)))
    assert dict(decoded.facts)["begins"] == r"\x05\x06\x07"
    for drawn in (picture.text(), picture.svg(), picture.html(), picture.json()):
        assert "\x1b" not in drawn


@pytest.mark.parametrize("tokens", [[-1], [1 << 32], [True], [0.5], "5 6", np.array([-1])])
def test_a_page_whose_tokens_are_no_ids_is_shown_without_them(
    tokens: Any, tmp_path: Path, numpy_backend: ml.Backend
) -> None:
    cache = bound(CausalCache(), numpy_backend, stored={0: 6})
    page = serialize(numpy_backend, cache.snapshot(0))
    place = page.arrays if isinstance(tokens, np.ndarray) else page.meta
    arrays, meta = {**page.arrays}, {**page.meta}
    (arrays if place is page.arrays else meta)["tokens"] = tokens
    path = write(tmp_path / "page.kv", SerializedSnapshot(meta, arrays))
    result = run("--model", bundled_model(), path)
    assert (result.exit_code, result.stderr) == (0, "")
    assert look_at_page(path).tokens is None


def test_a_page_of_every_kind_of_cache(tmp_path: Path, numpy_backend: ml.Backend) -> None:
    wrapper = bound(
        WrapperCache(SlidingWindowCache(2), CausalCache(), EncoderCache()), numpy_backend, stored={0: 5}
    )
    picture = look_at_page(write(tmp_path / "a", serialize(numpy_backend, wrapper.snapshot(0))))
    assert [(part.kind, part.tokens) for part in picture.parts] == [
        ("window", 3), ("attention", 5), ("encoder", 0),
    ]  # fmt: skip
    hybrid = bound(RecurrentCache((2,), (1, 2)), numpy_backend, stored={0: 3})
    with numpy_backend.new_context() as ctx:
        hybrid.conv_state(ctx, 1)
        hybrid.recurrent_state(ctx, 1)
    picture = look_at_page(write(tmp_path / "b", serialize(numpy_backend, hybrid.snapshot(0))))
    assert picture.parts == (
        PagePart("attention", 3, 1, "F32", 3 * CELL), PagePart("recurrent state", 3, 1, "float32", 16),
    )  # fmt: skip


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\xff" * 64])
def test_a_file_that_is_no_page_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(SnapshotCorruptError):
        look_at_page(path)


SPAN = {"begin": 0, "end": 1}


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {"snapshot": SPAN},
        {"snapshot": {**SPAN, "kind": "attention"}},
        {"snapshot": {**SPAN, "kind": "wrapper", "parts": 3}},
    ],
)
def test_a_page_of_no_snapshot_is_refused(tmp_path: Path, meta: dict[str, Any]) -> None:
    with pytest.raises(SnapshotCorruptError):
        look_at_page(write(tmp_path / "page", SerializedSnapshot(meta, {"x": np.zeros(3, np.float32)})))


# The command.


def run(*arguments: object) -> Any:
    return CliRunner().invoke(kvcache_engine.command.main.app, ["inspect", *map(str, arguments)])


def test_inspect_a_store(folder: Path) -> None:
    result = run(folder, "--budget", "10MiB")
    assert result.exit_code == 0, result.stderr
    assert "3 entries" in result.stdout
    assert "of 10.0 MiB" in result.stdout
    url = run(f"file://{folder}?budget=2MiB", "--json")
    record = json.loads(url.stdout)
    assert (record["picture"], record["total"], record["budget"]) == ("StorePicture", 3, 2 << 20)


def test_inspect_a_run_draws_trie_and_cells(make_model: Make, tmp_path: Path) -> None:
    model, page = make_model(), tmp_path / "run.html"
    arguments = ("--model", model, "--prompt", "abcdef", "--prompt", "abcxyz", "--prompt", "abcq")
    result = run(*arguments, "--max-tokens", 3, "--html", page)
    assert result.exit_code == 0, result.stderr
    assert "prefix tree  3 nodes, 8 of 19 prompt tokens reused (42 %)" in result.stdout
    assert "├─ def" in result.stdout
    assert "open sessions" in result.stdout
    assert "CausalCache" in result.stdout
    assert "\x1b" not in result.stdout
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert result.stderr.startswith(f"wrote {page} (")
    assert run(*arguments, "--html", page, "--quiet").stderr == ""
    record = json.loads(run(*arguments, "--max-tokens", 3, "--json").stdout)
    assert record["nodes"][0]["end"] == 4
    assert record["reused"] == 8


def test_inspect_one_prompt_and_one_token(make_model: Make) -> None:
    record = json.loads(run("--model", make_model(), "--prompt", "ab", "--max-tokens", 1, "--json").stdout)
    assert [(node["begin"], node["end"]) for node in record["nodes"]] == [(0, 3)]


def test_inspect_a_saved_conversation(make_model: Make, tmp_path: Path) -> None:
    model, out = make_model(), tmp_path / "talk.kv"
    saved = CliRunner().invoke(
        kvcache_engine.command.main.app,
        ["save", "--model", str(model), "--prompt", "hello", "--out", str(out)],
    )
    assert saved.exit_code == 0, saved.stderr
    result = run(out, "--model", model)
    assert result.exit_code == 0, result.stderr
    assert "6 tokens" in result.stdout
    assert "begins  hello" in result.stdout
    assert "begins  1 " in run(out).stdout, "of another model than the bundled one: ids"
    assert "digest  holds, sha256 " in result.stdout
    size = out.stat().st_size
    for at in (*range(0, size, size // 15), size - 1):
        flip(out, at)
        damaged = run(out, "--model", model)
        assert (damaged.exit_code, damaged.stdout) == (1, ""), at
        assert damaged.stderr.startswith(f"kvcache: inspect: {out}: damaged")
        flip(out, at)


@pytest.mark.parametrize("error", [None, errno.ENOSPC])
def test_a_page_that_cannot_be_written_is_one_line(
    folder: Path, tmp_path: Path, error: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that was there stays."""
    page = tmp_path / ("x.html" if error else "nowhere/x.html")
    if error is not None:
        page.write_text("before")
        monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(error, os.strerror(error))))
    result = run(folder, "--html", page)
    assert result.exit_code == 1
    assert "cannot be written" in result.stderr
    assert result.stderr.count("\n") == 1
    if error is not None:
        assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["x.html"]
        assert page.read_text() == "before"


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="there is no /dev/stdout")
def test_a_page_may_go_to_a_pipe(folder: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "kvcache_engine",
        "inspect",
        str(folder),
        "--html",
        "/dev/stdout",
        "--quiet",
    ]
    piped = subprocess.run(words, stdout=subprocess.PIPE, check=True, timeout=60)
    assert piped.stdout.startswith(b"<!doctype html>")


def test_on_a_terminal_it_is_drawn_in_colours(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from kvcache_engine.command import inspection
    from kvcache_engine.command.options import Place

    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(file=nowhere, force_terminal=True, width=90, record=True)
        picture = inspection.demonstrate(Place(make_model()), ["abc", "abd"], 2, None, 100, console)
        inspection.show(picture, console)
    text = console.export_text(styles=True)
    assert "\x1b[" in text
    assert "prefix tree" in text
