"""Pictures of files: the folder of a FileStore, and saved snapshots (see ``kvcache.stores.StoreFolder``)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvcache import check_serialized
from kvcache.stores import (
    SNAPSHOT_DIGEST,
    SerializedSnapshot,
    SnapshotCorruptError,
    SnapshotFile,
    StoreError,
    StoreFolder,
    digest_of_snapshot,
    snapshots_of,
)
from kvcache.views.pictures import NOT_CHECKED, EntryView, PagePart, PagePicture, StorePicture
from kvcache.views.words import Decode, preview, printable

# Stores.


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
    folder = StoreFolder(path)
    files, writing = folder.files(), folder.writing()
    shown = sorted(files, key=lambda file: (-file.last_used, file.path.stem))[: max(0, entries)]
    now = time.time()
    views, done, total = [], 0, sum(file.nbytes for file in shown)
    for file in shown:
        views.append(_entry(file, now - file.last_used))
        done += file.nbytes
        if progress is not None:
            progress(done, total)
    nbytes = sum(file.nbytes for file in files)
    return StorePicture(printable(str(folder.path)), len(files), nbytes, budget, tuple(views), writing)


def _entry(file: SnapshotFile, age: float) -> EntryView:
    name = printable(file.path.stem)
    try:
        checked = file.check()
        page = file.open()
        begin, end = check_serialized("inspect", page)
    except StoreError as error:
        return EntryView(name, file.nbytes, age, problem=printable(str(error)))
    kind = printable(str(page.meta["snapshot"]["kind"]))
    return EntryView(name, file.nbytes, age, begin, end, kind, note="" if checked else NOT_CHECKED)


# Pages.


def look_at_page(path: str | Path, decode: Decode | None = None) -> PagePicture:
    """A picture of a file with a serialized snapshot, such as a saved conversation.

    The whole file is read if it has a digest to check. Raises SnapshotCorruptError for a damaged or other
    file, StoreUnavailableError for one that cannot be read.
    """
    file = SnapshotFile.of(path)
    page = file.open()
    digest = _checked_digest(file, page)
    try:
        snapshots = snapshots_of(page)
    except (LookupError, TypeError, ValueError) as error:
        raise SnapshotCorruptError(f"inspect: {path}: not the page of a snapshot ({error!r})") from error
    spans = [check_serialized(f"inspect: {path}", each) for each in snapshots]
    begin, end = spans[0][0], spans[-1][1]
    parts = tuple(part for each in snapshots for part in _parts(each.meta["snapshot"], each))
    tokens = _tokens(page)
    facts = [(printable(name), _short(value)) for name, value in page.meta.items() if name not in _DRAWN]
    if tokens is not None:
        facts.insert(0, ("begins", preview(tokens, decode)))
    facts.append(("digest", digest))
    return PagePicture(
        printable(str(path)),
        file.nbytes,
        begin,
        end,
        parts,
        None if tokens is None else len(tokens),
        tuple(facts),
    )


_DRAWN = {"snapshot", "snapshots", "tokens", SNAPSHOT_DIGEST}


def _checked_digest(file: SnapshotFile, page: SerializedSnapshot) -> str:
    """What there is to say of a page's digest, which holds; SnapshotCorruptError where it does not."""
    if (stored := page.meta.get(SNAPSHOT_DIGEST)) is not None:
        if stored != digest_of_snapshot(page):
            raise SnapshotCorruptError(f"inspect: {file.path}: damaged: its digest is wrong")
        return f"holds, sha256 {stored[:16]}…"
    if file.is_entry:
        try:
            checked = file.check()
        except SnapshotCorruptError as error:
            raise SnapshotCorruptError(f"inspect: {file.path}: damaged: {error}") from error
        return "holds, that of its manifest" if checked else "not checked without the key"
    return "none: whether the file is complete cannot be checked"


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
