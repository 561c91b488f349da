"""The plugin records of the built-in stores."""

from __future__ import annotations

import functools
import importlib
import logging
import os
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from kvcache.stores.digests import XXH3, check_digest, load
from kvcache.stores.errors import StoreError, StoreValueError
from kvcache.stores.hookspecs import StoreSpec, hookimpl
from kvcache.stores.memory import MemoryStore
from kvcache.stores.options import parse_bytes, read_truth
from kvcache.stores.protocol import SnapshotStore
from ml import Availability

__all__ = ["BuiltinStore", "path_of", "specs"]

log = logging.getLogger("kvcache")

_SHARE = "10%"
"""The share of its file system that a folder without a given budget may use."""
_VALKEY_SCHEMES = ("valkey", "valkeys", "redis", "rediss")
"""The second and the fourth use TLS."""


class BuiltinStore:
    """A plugin with one record."""

    def __init__(self, spec: StoreSpec) -> None:
        self._spec = spec

    @hookimpl
    def kvcache_store(self) -> StoreSpec:
        return self._spec


def specs() -> list[StoreSpec]:
    """::

    file:///absolute/path?budget=10GiB&durable=no    budget=none: no limit
    memory:?budget=2GiB
    mooncake://host:port?segment=4GiB                the address of the master
    valkey://host:port/db?prefix=kvcache&ttl=7d      by each of its schemes
    """
    install = "pip install 'ml-kvcache[{}]'".format
    return [
        StoreSpec("file", install("disk"), _probe_file, _open_file, _file_arguments),
        StoreSpec("memory", "", lambda: Availability(True), _open_memory),
        StoreSpec("mooncake", install("mooncake"), _probe_mooncake, _open_mooncake, _check_mooncake),
        *(
            StoreSpec(
                scheme,
                install("valkey"),
                _probe_valkey,
                functools.partial(_open_valkey, scheme),
                functools.partial(_check_valkey, scheme),
            )
            for scheme in _VALKEY_SCHEMES
        ),
    ]


def _probe_valkey() -> Availability:
    try:
        version = str(importlib.import_module("valkey").__version__)
    except ImportError as error:
        return Availability(False, f"it needs the package valkey ({error})")
    return Availability(True, version=version)


def _check_valkey(scheme: str, url: str | None = None, **options: Any) -> None:
    from kvcache.stores.valkey.options import ValkeyOptions

    ValkeyOptions.of(f"{scheme}://localhost" if url is None else url, options)


def _open_valkey(scheme: str, url: str | None = None, **options: Any) -> SnapshotStore:
    from kvcache.stores.valkey import ValkeyStore

    return ValkeyStore(f"{scheme}://localhost" if url is None else url, **options)


def _probe_mooncake() -> Availability:
    from kvcache.stores.mooncake.connecting import load, version

    try:
        load()
    except StoreError as error:
        return Availability(False, str(error))
    return Availability(True, version=version())


def _check_mooncake(url: str | None = None, **options: Any) -> None:
    from kvcache.stores.mooncake.options import MooncakeOptions

    MooncakeOptions.of(url, options)


def _open_mooncake(url: str | None = None, **options: Any) -> SnapshotStore:
    from kvcache.stores.mooncake import MooncakeStore

    return MooncakeStore(url, **options)


def _probe_file() -> Availability:
    try:
        version = str(load("FileStore", "disk", "xxhash").VERSION)
        importlib.import_module("sqlite3")
    except StoreError as error:
        return Availability(False, str(error))
    except ImportError as error:
        return Availability(False, f"this Python was built without sqlite3 ({error})")
    if os.name != "posix":
        return Availability(False, "it needs POSIX file locks")
    return Availability(True, version=version)


def _file_arguments(
    url: str | None = None,
    *,
    path: str | os.PathLike[str] | None = None,
    budget: int | str | None = _SHARE,
    durable: bool | str = True,
    digest: str = XXH3,
    secret: str | None = None,
) -> dict[str, Any]:
    """The arguments for FileStore."""
    where = path_of(url) if url is not None else path
    if where is None or (url is not None and path is not None):
        raise StoreValueError(f"open_store: a file store has one path; the URL is {url!r}, path={path!r}")
    wait = read_truth("open_store", "durable", durable)
    limit = None if budget == "none" else budget
    if limit != _SHARE:
        limit = parse_bytes(limit, "open_store: budget")
    check_digest("FileStore", digest, secret)
    return {"path": where, "budget": limit, "durable": wait, "digest": digest, "secret": secret}


def _open_file(url: str | None = None, **options: Any) -> SnapshotStore:
    from kvcache.stores.file import FileStore

    arguments = _file_arguments(url, **options)
    if arguments["budget"] == _SHARE:
        arguments["budget"] = _share_of_disk(Path(arguments["path"]))
    return FileStore(**arguments)


def _share_of_disk(folder: Path) -> int:
    """The budget of a folder for which none was given: a tenth of its file system, and at least 1 GiB."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    disk = os.statvfs(existing)
    limit = max(1 << 30, disk.f_frsize * disk.f_blocks // 10)
    log.info(
        "%s: a store of at most %d bytes, a tenth of its disk; budget= sets another limit", folder, limit
    )
    return limit


def _open_memory(url: str | None = None, *, budget: int | str | None = None) -> SnapshotStore:
    return MemoryStore(parse_bytes(budget, "open_store: budget"))


def path_of(url: str) -> str:
    """The folder that a URL such as file:///var/cache/kv names."""
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or not path or "\0" in path:
        raise StoreValueError(f"open_store: {url!r} has no folder; write file:///absolute or file:relative")
    return path
