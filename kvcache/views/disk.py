"""Inspecting files: the folder of a FileStore, and saved snapshots. Nothing is changed or marked as used.

A store's folder is read without its lock and without opening the store, which would remove broken entries: an
entry that another process is writing or evicting may therefore show as broken.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvcache.prefix.tree_entry import span_of
from kvcache.stores import (
    SNAPSHOT_DIGEST,
    SerializedSnapshot,
    SnapshotCorruptError,
    StoreUnavailableError,
    digest_of_snapshot,
    snapshots_of,
    unpack,
)
from kvcache.stores.folder import CHANGING, LOCK, PAGES, STORE_FORMAT
from kvcache.stores.manifest import ENTRY, MANIFEST_BYTES, Manifest, is_stem, unkeyed_digest
from kvcache.views.pictures import NOT_CHECKED, EntryView, PagePart, PagePicture, StorePicture
from kvcache.views.words import Decode, preview, printable

# Stores.

_BLOCK = 1 << 19
"""Bytes that are read and digested at a time."""


def is_store(path: Path) -> bool:
    """Whether this is the folder of a FileStore."""
    try:
        return (path / LOCK).read_bytes()[: len(STORE_FORMAT)] == STORE_FORMAT
    except OSError:
        return False


def look_at_store(
    path: str | Path,
    budget: int | None = None,
    entries: int = 50,
    progress: Callable[[int, int], None] | None = None,
) -> StorePicture:
    """A picture of a store's folder; the ``entries`` most recently used entries are read completely.

    ``progress(done, total)`` counts their bytes. The folder does not record its budget: pass it to have it
    shown. Raises StoreUnavailableError for a folder that is not a store, or cannot be read.
    """
    path = Path(path)
    if not is_store(path):
        raise StoreUnavailableError(
            f"inspect: {path} is not a store: {LOCK} is missing or has another format"
        )
    try:
        files, changing = _scan(path / PAGES), path / CHANGING
        writing = len(os.listdir(changing)) if changing.is_dir() else 0  # noqa: PTH208
    except OSError as error:
        raise StoreUnavailableError(f"inspect: {path}: {error.strerror or error}") from error
    shown = sorted(files, key=lambda stem: (-files[stem].st_mtime, stem))[: max(0, entries)]
    now = time.time()
    views, done, total = [], 0, sum(_nbytes(files[stem]) for stem in shown)
    for stem in shown:
        views.append(_entry(path / PAGES / (stem + ENTRY), stem, files[stem], now))
        done += _nbytes(files[stem])
        if progress is not None:
            progress(done, total)
    nbytes = sum(map(_nbytes, files.values()))
    return StorePicture(printable(str(path)), len(files), nbytes, budget, tuple(views), writing)


def _scan(pages: Path) -> dict[str, os.stat_result]:
    """The entries' files, by their stems."""
    files = {}
    with os.scandir(pages) as items:
        for item in items:
            stem, suffix = os.path.splitext(item.name)  # noqa: PTH122
            if suffix == ENTRY and is_stem(stem) and item.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
                    files[stem] = item.stat(follow_symlinks=False)
    return files


def _nbytes(status: os.stat_result) -> int:
    return max(0, status.st_size - MANIFEST_BYTES)


def _entry(path: Path, stem: str, status: os.stat_result, now: float) -> EntryView:
    name, nbytes, age = printable(stem), _nbytes(status), now - status.st_mtime
    try:
        checked = _check_entry(path)
        page = _open_page(path)
        begin, end = span_of(page)
    except (OSError, ValueError, SnapshotCorruptError) as error:
        return EntryView(name, nbytes, age, problem=printable(str(error)))
    kind = printable(str(page.meta["snapshot"].get("kind", "?")))
    return EntryView(name, nbytes, age, begin, end, kind, note="" if checked else NOT_CHECKED)


def _check_entry(path: Path) -> bool:
    """That an entry is what its manifest says; False where only who has the key can tell of its digest.

    Raises SnapshotCorruptError, ValueError or OSError where it is not.
    """
    with path.open("rb", buffering=0) as file:  # not mapped: a device that fails is an error, and no signal
        left = _nbytes(os.fstat(file.fileno()))
        file.seek(left)
        manifest = Manifest.parse(file.read(MANIFEST_BYTES), path.stem)
        if manifest.nbytes != left:
            raise SnapshotCorruptError(f"{manifest.nbytes} bytes were put, {left} are stored")
        digest, block = unkeyed_digest(path.stem, left), memoryview(bytearray(_BLOCK))
        if digest is None:
            return False
        file.seek(0)
        while left and (count := file.readinto(block[:left])):
            digest.update(block[:count])
            left -= count
    if digest.hexdigest() != manifest.digest:
        raise SnapshotCorruptError("its digest is wrong")
    return True


# Pages.


def look_at_page(path: str | Path, decode: Decode | None = None) -> PagePicture:
    """A picture of a file with a serialized snapshot, such as a saved conversation.

    The whole file is read if it has a digest to check. Raises SnapshotCorruptError for a damaged or other
    file, StoreUnavailableError for one that cannot be read.
    """
    path = Path(path)
    try:
        page = _open_page(path)
        size = path.stat().st_size
        digest = _checked_digest(path, page)
    except OSError as error:
        raise StoreUnavailableError(f"inspect: {path}: {error.strerror or error}") from error
    try:
        snapshots = snapshots_of(page)
        spans = [span_of(each) for each in snapshots]
        begin, end = spans[0][0], spans[-1][1]
        parts = tuple(part for each in snapshots for part in _parts(each.meta["snapshot"], each))
    except SnapshotCorruptError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise SnapshotCorruptError(f"inspect: {path}: not the page of a snapshot ({error!r})") from error
    tokens = _tokens(page)
    facts = [(printable(name), _short(value)) for name, value in page.meta.items() if name not in _DRAWN]
    if tokens is not None:
        facts.insert(0, ("begins", preview(tokens, decode)))
    facts.append(("digest", digest))
    return PagePicture(
        printable(str(path)),
        size,
        begin,
        end,
        parts,
        None if tokens is None else len(tokens),
        tuple(facts),
    )


_DRAWN = {"snapshot", "snapshots", "tokens", SNAPSHOT_DIGEST}


def _checked_digest(path: Path, page: SerializedSnapshot) -> str:
    """What there is to say of a page's digest, which holds; SnapshotCorruptError where it does not."""
    if (stored := page.meta.get(SNAPSHOT_DIGEST)) is not None:
        if stored != digest_of_snapshot(page):
            raise SnapshotCorruptError(f"inspect: {path}: damaged: its digest is wrong")
        return f"holds, sha256 {stored[:16]}…"
    if path.suffix == ENTRY:
        try:
            checked = _check_entry(path)
        except ValueError as error:
            raise SnapshotCorruptError(f"inspect: {path}: damaged: {error}") from error
        return "holds, that of its manifest" if checked else "not checked without the key"
    return "none: whether the file is complete cannot be checked"


def page_meta(path: str | Path) -> Mapping[str, Any]:
    """What a page's file says of itself; raises as ``look_at_page``."""
    try:
        return _open_page(Path(path)).meta
    except OSError as error:
        raise StoreUnavailableError(f"inspect: {path}: {error.strerror or error}") from error


def _open_page(path: Path) -> SerializedSnapshot:
    """The page of a file, mapped: what nobody looks at is not read."""
    size = path.stat().st_size
    size -= MANIFEST_BYTES if path.suffix == ENTRY else 0
    if size <= 0:
        raise SnapshotCorruptError(f"inspect: {path}: an empty file")
    try:
        return unpack(np.memmap(path, np.uint8, "r", shape=(size,)))
    except SnapshotCorruptError as error:
        raise SnapshotCorruptError(
            f"inspect: {path}: damaged, or not a saved conversation ({error})"
        ) from error


def _tokens(page: SerializedSnapshot) -> list[int | bytes] | None:
    """Token ids that were saved with the snapshot: a list in its meta, or an array."""
    tokens = page.meta.get("tokens", page.arrays.get("tokens"))
    if isinstance(tokens, np.ndarray):
        tokens = tokens.tolist()
    ids = isinstance(tokens, list) and all(type(token) is int and 0 <= token < 1 << 32 for token in tokens)
    return tokens if ids else None


def _short(value: Any, width: int = 60) -> str:
    text = printable(value if isinstance(value, str) else repr(value))
    return text if len(text) <= width else text[: width - 1] + "…"


def _parts(meta: Mapping[str, Any], page: SerializedSnapshot, at: str = "") -> Iterator[PagePart]:
    """As kvcache.snapshots.serialize has written them."""
    kind = meta["kind"]
    if kind == "wrapper":
        for i, part in enumerate(meta["parts"]):
            yield from _parts(part, page, f"{at}{i}/")
    elif kind == "states":
        arrays = [page.arrays[tensor[0]] for _, _, tensor in meta["states"]]
        layers = len({layer for _, layer, _ in meta["states"]})
        yield PagePart("recurrent state", int(meta["end"]), layers, _dtypes(arrays), _sum(arrays))
    elif kind == "encoder":
        arrays = [page.arrays[name] for _, tensors in meta["layers"] for name, _ in tensors]
        yield PagePart("encoder", int(meta["length"]), len(meta["layers"]), _dtypes(arrays), _sum(arrays))
    else:
        arrays = [page.arrays[name] for _, _, tensors in meta["layers"] for name, _ in tensors]
        name = "window" if meta["whole"] else "attention"
        positions = int(page.arrays[f"{at}positions"].size)
        yield PagePart(name, positions, len(meta["layers"]), printable(str(meta["dtype"])), _sum(arrays))


def _sum(arrays: list[np.ndarray]) -> int:
    return sum(array.nbytes for array in arrays)


def _dtypes(arrays: list[np.ndarray]) -> str:
    return " ".join(sorted({str(array.dtype) for array in arrays}))
