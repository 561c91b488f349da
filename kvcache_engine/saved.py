"""A conversation in one file: its tokens, with their keys and values.

The file is a serialized snapshot of kvcache.stores (safetensors format). Its meta names the model and the
settings that computed it, and contains a sha256 over everything; it does not depend on the backend, so that
it can be resumed on any other.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import ml
from kvcache import deserialize, serialize
from kvcache.cache import CacheDType, InvalidRangeError
from kvcache.stores import (
    SNAPSHOT_DIGEST,
    SerializedSnapshot,
    SnapshotCorruptError,
    compose,
    digest_of_snapshot,
    pack,
    snapshots_of,
    unpack,
)
from kvcache_engine.engine import Engine
from kvcache_engine.errors import RunnerError
from kvcache_engine.request_state import RequestState
from kvcache_engine.requests import GenerationOptions
from kvcache_engine.sampling import Sampler
from kvcache_engine.scheduler import Request, chunks

__all__ = ["ConversationError", "SavedConversation", "adopt", "capture", "read", "write", "write_whole"]

FORMAT = "kvcache.conversation/2"
_BLOCK = 16 << 20
"""Bytes read between two reports of progress."""
_FIELDS = {"format", "tokens", "evaluated", "model", "cache", "snapshots"}


class ConversationError(RunnerError):
    """A saved conversation that cannot be used: a damaged file, or one from another model or cache."""


@dataclass(frozen=True, slots=True)
class SavedConversation:
    """``tokens``, and snapshots of the first ``evaluated`` of them: all, or all but the last.

    ``pages`` are consecutive snapshots; each ends at a window or a state from which others can continue.
    ``model`` is the engine's identity, ``cache`` the cache's ``settings``.
    """

    tokens: tuple[int, ...]
    evaluated: int
    model: Mapping[str, Any]
    cache: Mapping[str, Any]
    pages: tuple[SerializedSnapshot, ...]

    @property
    def dtype(self) -> ml.DType:
        """The dtype in which the model computed."""
        name = str(_naming(self.model)["dtype"])
        if name not in ml.DType.__members__:
            raise ConversationError(
                f"the conversation is of a model in {name!r:.40}, which is not a known dtype"
            )
        return ml.DType[name]

    @property
    def cache_dtype(self) -> CacheDType:
        """The name of the format of keys and values."""
        return str(_naming(self.cache)["dtype"])


def capture(engine: Engine, tokens: Sequence[int], inside: int | None = None) -> SavedConversation:
    """A saved conversation with the engine's snapshots of ``tokens``; missing ones are computed. Statistics
    do not change.

    A prompt that diverges before the end continues from the windows and states inside the conversation, which
    take at most ``inside`` bytes (None: as many as everything else). Raises CacheFullError or
    SessionLimitError if the engine's requests leave no room.
    """
    with engine.lock:
        return _captured(engine, tokens, inside)


def _captured(engine: Engine, tokens: Sequence[int], inside: int | None) -> SavedConversation:
    variant = engine.variant()
    complete = engine.ranks.least([engine.prefix.longest([*tokens, 0], variant=variant)]) == [len(tokens)]
    evaluated = len(tokens) if complete else len(tokens) - 1
    if evaluated < 1:
        raise ConversationError("save: the conversation has only one token, so there is nothing to save")
    asked = [*tokens[:evaluated], 0]  # one more token: a session always leaves one to evaluate
    with (
        engine.prefix.stats.paused(),
        engine.ranks.begin(engine.prefix, asked, variant=variant) as session,
    ):
        request = Request(RequestState(-1, asked[:-1], GenerationOptions(), Sampler()))
        request.session, request.run.stored = session, session.cached
        while request.run.stored < evaluated:
            engine.forward(list(chunks([request], engine.options.prefill_chunk, engine.prefix)))
        backend = engine.model.backend
        pages = tuple(serialize(backend, snapshot) for snapshot in session.snapshots(inside))
    return SavedConversation(tuple(tokens), evaluated, _model_of(engine), _settings_of(engine), pages)


def _model_of(engine: Engine) -> Mapping[str, Any]:
    """The identity of the engine's model."""
    variant = engine.variant()
    return engine.identity if variant is None else {**engine.identity, "variant": compose(variant).hex()}


def _settings_of(engine: Engine) -> dict[str, Any]:
    """The settings of the engine's cache, including the block size if it is batch-invariant."""
    settings, options = dict(engine.cache.settings()), engine.options
    return {**settings, "whole_blocks": options.block_size} if options.batch_invariant else settings


def adopt(engine: Engine, saved: SavedConversation) -> None:
    """Add a saved conversation to the engine's cache: prompts that begin with its tokens continue from there.

    Raises ConversationError for one from another model or kind of cache, CacheFullError if it does not fit.
    """
    parts = [model.get("tensor_parallel", "0/1") for model in (saved.model, engine.identity)]
    if parts[0] != parts[1]:
        raise ConversationError(
            f"the conversation holds the heads of rank {parts[0]}, and this is rank {parts[1]} of the model"
        )
    if dict(saved.model) != dict(_model_of(engine)):
        raise ConversationError(
            "the conversation was saved with another model (its config.json, weights or dtype differ)"
        )
    settings = _settings_of(engine)
    if dict(saved.cache) != settings:
        raise ConversationError(f"the conversation is of a cache {dict(saved.cache)}; this one is {settings}")
    try:
        snapshots = [deserialize(engine.model.backend, page) for page in saved.pages]
        with engine.lock:
            tokens = saved.tokens[: saved.evaluated]
            adopted = engine.prefix.adopt(tokens, snapshots, variant=engine.variant())
    except (SnapshotCorruptError, InvalidRangeError) as error:
        raise ConversationError(f"the conversation does not fit the model's cache: {error}") from error
    if not adopted:
        raise ConversationError("the conversation does not fit the model's cache: it is incomplete")


def check_target(path: str | os.PathLike[str]) -> Path:
    """The file that ``write`` would create. Raises ConversationError if it would refuse to."""
    target = Path(path).expanduser()
    if target.is_dir():
        raise ConversationError(f"{path}: is a folder; give a file")
    if target.exists() and not target.is_file():
        raise ConversationError(f"{path}: is a device or a pipe; give a regular file")
    if not target.absolute().parent.is_dir():
        raise ConversationError(f"{path}: there is no folder {Path(path).parent} to write it to")
    return target


def write(path: str | os.PathLike[str], saved: SavedConversation) -> int:
    """Write the file, atomically; returns its size in bytes. Raises ConversationError if that is not
    possible.
    """
    meta = {
        "format": FORMAT,
        "tokens": list(saved.tokens),
        "evaluated": saved.evaluated,
        "model": dict(saved.model),
        "cache": dict(saved.cache),
        "snapshots": [page.meta["snapshot"] for page in saved.pages],
    }
    arrays = {
        f"{i}:{name}": array for i, page in enumerate(saved.pages) for name, array in page.arrays.items()
    }
    meta[SNAPSHOT_DIGEST] = digest_of_snapshot(SerializedSnapshot(meta, arrays))
    parts = pack(SerializedSnapshot(meta, arrays))
    target = check_target(path)
    try:
        write_whole(target, parts)
    except OSError as error:
        raise ConversationError(f"{target}: cannot be written ({error.strerror or error})") from error
    return sum(part.nbytes for part in parts)


def read(
    path: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None
) -> SavedConversation:
    """Read a file and check it; ``progress(done, total)`` counts the bytes.

    Raises ConversationError for anything but a complete saved conversation.
    """
    source = Path(path).expanduser()
    try:
        page = unpack(_bytes(source, progress))
    except OSError as error:
        raise ConversationError(f"{source}: cannot be read ({error.strerror or error})") from error
    except SnapshotCorruptError as error:
        raise ConversationError(f"{source}: damaged, or not a saved conversation ({error})") from error
    meta = dict(page.meta)
    if meta.get("format") != FORMAT:
        raise ConversationError(f"{source}: not a saved conversation of the format {FORMAT}")
    if meta.pop(SNAPSHOT_DIGEST, None) != digest_of_snapshot(page):
        raise ConversationError(f"{source}: damaged: its digest does not match; save the conversation again")
    if not _is_whole(meta):
        raise ConversationError(f"{source}: a saved conversation with invalid fields")
    pages = tuple(snapshots_of(page))
    return SavedConversation(tuple(meta["tokens"]), meta["evaluated"], meta["model"], meta["cache"], pages)


def _bytes(source: Path, progress: Callable[[int, int], None] | None) -> np.ndarray:
    with source.open("rb", buffering=0) as file:
        total = os.fstat(file.fileno()).st_size
        data = np.empty(total, np.uint8)
        done = 0
        while count := file.readinto(data[done : done + _BLOCK].data):
            done += count
            if progress is not None:
                progress(done, total)
    return data[:done]


def _is_whole(meta: Mapping[str, Any]) -> bool:
    if meta.keys() != _FIELDS or not all(isinstance(meta[name], Mapping) for name in ("model", "cache")):
        return False
    tokens, evaluated, snapshots = meta["tokens"], meta["evaluated"], meta["snapshots"]
    if not isinstance(snapshots, list) or not snapshots:
        return False
    counts = isinstance(tokens, list) and all(type(token) is int and token >= 0 for token in tokens)
    return counts and type(evaluated) is int and evaluated > 0 and evaluated in (len(tokens) - 1, len(tokens))


def write_whole(target: Path, parts: Sequence[memoryview]) -> None:
    """Write a file atomically: a temporary file is renamed once its bytes are on the device.

    If the target is a link, the link stays, and the file that it points to is replaced.
    """
    target = target.resolve()
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # if folders cannot be synced, a crash of the machine may lose it
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _naming(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a model's identity or a cache's settings that names a dtype or format."""
    for key in ("dtype", "attention", "caches"):
        value = record.get(key)
        if key == "dtype" and isinstance(value, str):
            return record
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, Mapping):
            return _naming(value)
    raise ConversationError("the conversation has no dtype")
