"""Conversations that outlive the process: the name, tokens and text of each in a file of its own.

The files are in the folder of a store (``conversations/<model>/<name>.json``), whose entries hold the
computed keys and values. A file is replaced as a whole and contains its sha256: after a crash, the previous
version is there.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kvcache.stores import strict_json
from kvcache_engine.errors import RequestError
from kvcache_engine.saved import write_whole

log = logging.getLogger("kvcache")

__all__ = ["Conversation", "KeptConversations"]

FORMAT = "kvcache.chat/1"
FOLDER = "conversations"
SUFFIX = ".json"
LONGEST_STEM = 150
"""The longest stem of a file's name in bytes, before the suffix that distinguishes long names."""
_FIELDS = {"format", "name", "model", "tokens", "turns", "text", "sha256"}
File = tuple[int, int, int]
"""Inode, date and size, which identify a version of a file."""


@dataclass(slots=True)
class Conversation:
    """The ``tokens`` of a conversation, and the start of each turn in ``turns``."""

    name: str
    tokens: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)

    def undo(self) -> int:
        """Remove the last turn and its answer; returns the number of tokens removed."""
        if not self.turns:
            raise RequestError(f"undo: {self.name} has no turn to remove")
        begin = self.turns.pop()
        count = len(self.tokens) - begin
        del self.tokens[begin:]
        return count


def _weights_of(identity: Mapping[str, Any]) -> str:
    """What an engine's identity says of the weights: the digest of their files, or of all but the dtype."""
    if "files" in identity:
        return str(identity["files"])
    weights = {name: value for name, value in identity.items() if name != "dtype"}
    return _digest(weights)


class KeptConversations:
    """The conversations with one model that are kept in the existing folder of a store.

    ``model`` is the engine's identity, of which the weights alone count, or a name of these; ``decode``
    returns the text of tokens, for people to read. A failed write is logged once and tried again with the
    next change.
    """

    def __init__(
        self, store: Path, model: Mapping[str, Any] | str, decode: Callable[[Sequence[int]], str]
    ) -> None:
        self._model, self._decode = model if isinstance(model, str) else _weights_of(model), decode
        self.folder = store / FOLDER / self._model[:16]
        self._seen: dict[str, File] = {}
        self.failed: dict[str, str] = {}
        """The conversations whose last change could not be kept, by name, with the reason."""
        self.writable = True
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.writable = os.access(self.folder, os.W_OK)
        except OSError:
            self.writable = False

    def read(self) -> list[Conversation]:
        """All conversations, by name. Damaged files are left in place and logged."""
        conversations = []
        self._sweep()
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            try:
                seen = _file_of(path)
                conversation = self._parsed(path.read_bytes())
            except (OSError, ValueError) as error:
                log.warning("%s: not a readable conversation (%s); it is left unchanged", path, error)
                continue
            if seen is not None and self._path(conversation.name) == path:
                self._seen[conversation.name] = seen
                conversations.append(conversation)
        return conversations

    def _sweep(self) -> None:
        """Remove what dead processes have left: a writer would hold the lock."""
        if not self.writable:
            return
        with contextlib.suppress(OSError), self._locked():
            for path in self.folder.glob(".*.tmp"):
                path.unlink()

    @property
    def others(self) -> int:
        """The number of conversations with other models in the same folder."""
        return sum(path.parent != self.folder for path in self.folder.parent.glob(f"*/*{SUFFIX}"))

    def write(self, conversation: Conversation, taken: Container[str] = ()) -> None:
        """Save a conversation as it is now; one without tokens is deleted.

        If another process has written a conversation of this name since it was read, that one stays, and this
        one gets a new name that is not in ``taken``.
        """
        if not self.writable:
            return
        try:
            with self._locked():
                foreign = self._is_foreign(conversation.name)
                if foreign and conversation.tokens:
                    self._rename(conversation, taken)
                if conversation.tokens or not foreign:
                    self._replace(conversation)
        except OSError as error:
            if conversation.name not in self.failed:
                log.warning("%s is not kept: %s: %s", conversation.name, self.folder, error.strerror or error)
            self.failed[conversation.name] = error.strerror or str(error)
        else:
            self.failed.pop(conversation.name, None)

    def _replace(self, conversation: Conversation) -> None:
        path = self._path(conversation.name)
        if not conversation.tokens:
            path.unlink(missing_ok=True)
            self._seen.pop(conversation.name, None)
            return
        write_whole(path, [memoryview(self._encoded(conversation))])
        seen = _file_of(path)
        assert seen is not None
        self._seen[conversation.name] = seen

    def _is_foreign(self, name: str) -> bool:
        now = _file_of(self._path(name))
        return now is not None and now != self._seen.get(name)

    def _rename(self, conversation: Conversation, taken: Container[str]) -> None:
        before, number = conversation.name, 2
        while (name := f"{before}-{number}") in taken or self._path(name).exists():
            number += 1
        conversation.name = name
        self.failed.pop(before, None)
        log.warning(
            "%s has since been written by another process, or cannot be read; this conversation is now %s",
            before,
            name,
        )

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes from writing."""
        fcntl: Any = importlib.import_module("fcntl")
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _path(self, name: str) -> Path:
        stem = quote(name, safe="")
        if len(stem) > LONGEST_STEM:
            stem = f"{stem[:LONGEST_STEM]}~{hashlib.sha256(name.encode()).hexdigest()[:16]}"
        return self.folder / f"{stem}{SUFFIX}"

    def _encoded(self, conversation: Conversation) -> bytes:
        record = {
            "format": FORMAT,
            "name": conversation.name,
            "model": self._model,
            "tokens": conversation.tokens,
            "turns": conversation.turns,
            "text": self._decode(conversation.tokens),
        }
        return strict_json.encode({**record, "sha256": _digest(record)}).encode()

    def _parsed(self, data: bytes) -> Conversation:
        """Parse a file. Raises ValueError unless it is a complete conversation with this model."""
        record = strict_json.decode(data)
        if not isinstance(record, dict) or record.keys() != _FIELDS or record["format"] != FORMAT:
            raise ValueError(f"not of the format {FORMAT}")
        if record.pop("sha256") != _digest(record):
            raise ValueError("damaged: its digest is wrong")
        if record["model"] != self._model:
            raise ValueError("it belongs to another model")
        return Conversation(record["name"], record["tokens"], record["turns"])


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(strict_json.encode(dict(record), canonical=True).encode()).hexdigest()


def _file_of(path: Path) -> File | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
