"""LMCache's chunks as entries of stores, and the options of connector and adapter; imports no LMCache."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np

from kvcache.integrations.model_folder import model_folder, unknown_weights
from kvcache.integrations.open_stores import check_number, parse_options
from kvcache.stores import SerializedSnapshot, SnapshotCorruptError, digest_of, files_digest

__all__ = ["ChunkShape", "ConnectorOptions", "chunk_key", "identity_of_model", "object_key"]

PREFIX = "kvcache."
"""The prefix of our options in ``extra_config``."""
META = "lmcache_chunk"


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """The options of ``KVStoreConnector`` and ``KVStoreL2Adapter``, checked.

    ``store``: URLs, nearest first; they are read in order, and all are written. ``threads``: the number of
    threads for reads and writes. ``identity`` replaces the digest of the model's files.
    """

    store: tuple[str, ...]
    threads: int = 2
    identity: Mapping[str, Any] | None = None

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any]) -> Self:
        """Raises InvalidRangeError for an unknown ``kvcache.`` option and for an invalid value."""
        ours = {
            name.removeprefix(PREFIX): value
            for name, value in extra_config.items()
            if name.startswith(PREFIX)
        }
        return cls.of("extra_config", ours, PREFIX)

    @classmethod
    def of(cls, where: str, given: Mapping[str, Any], prefix: str = "") -> Self:
        """Raises InvalidRangeError for an unknown option and for an invalid value."""
        options = parse_options(where, given, [field.name for field in fields(cls)], prefix)
        check_number(f"{where}: {prefix}threads", options.get("threads", 1), int, 1)
        return cls(**options)


def identity_of_model(name: str, reader: str = "KVStoreConnector") -> dict[str, Any]:
    """A digest of the files of a model, by its folder or its name on the hub.

    Raises UnknownModelError if they are not on this machine.
    """
    folder = model_folder(name)
    if folder is None:
        option = (
            f"extra_config: {PREFIX}identity" if reader == "KVStoreConnector" else "adapter_params: identity"
        )
        raise unknown_weights(reader, repr(name), option)
    return {"files": files_digest(folder)}


def chunk_key(identity: Mapping[str, Any], key: Any) -> str:
    """An entry's key; ``key`` is LMCache's, which names the model, rank, tokens, dtype, tags and layer.

    Made of all fields, except those of the request that are not tags. ``to_string`` is not used, since it
    escapes nothing and is not unique. Raises StoreValueError for tags that ``compose`` refuses.
    """
    named: dict[str, Any] = {field.name: getattr(key, field.name) for field in fields(key)}
    del named["request_configs"]
    return digest_of(identity, type(key).__name__, {**named, "dtype": str(key.dtype)})


def object_key(identity: Mapping[str, Any], key: Any) -> str:
    """An entry's key; ``key`` is an object's in multiprocess mode, which names the model, rank, group of
    layers, tokens and salt.
    """
    return digest_of(
        identity, type(key).__name__, {field.name: getattr(key, field.name) for field in fields(key)}
    )


@dataclass(frozen=True)
class ChunkShape:
    """The layout of a chunk's bytes: tensors of these shapes and dtypes, in a format of LMCache."""

    form: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    def pack(self, data: np.ndarray) -> SerializedSnapshot:
        """The entry of a chunk, uint8 (bytes,)."""
        meta = {"form": self.form, "shapes": [[*shape] for shape in self.shapes], "dtypes": [*self.dtypes]}
        return SerializedSnapshot({META: meta}, {"0": data})

    @classmethod
    def unpack(cls, entry: SerializedSnapshot) -> tuple[Self, np.ndarray]:
        """A chunk's layout, and a view of its bytes, uint8 (bytes,). Raises SnapshotCorruptError for anything
        else.
        """
        try:
            meta = entry.meta[META]
            (data,) = entry.arrays.values()
            shapes = tuple(tuple(int(size) for size in shape) for shape in meta["shapes"])
            layout = cls(str(meta["form"]), shapes, tuple(str(name) for name in meta["dtypes"]))
        except (KeyError, TypeError, ValueError) as error:
            raise SnapshotCorruptError(f"load: not a chunk of LMCache: {error!r}") from error
        if data.dtype != np.uint8 or data.ndim != 1 or len(layout.shapes) != len(layout.dtypes):
            raise SnapshotCorruptError(f"load: chunk of LMCache: {data.dtype} {data.shape}; it must be bytes")
        if any(size < 0 for shape in shapes for size in shape) or sum(map(math.prod, shapes)) > data.size:
            raise SnapshotCorruptError(f"load: chunk of LMCache: {data.size} bytes for other shapes")
        return layout, data
