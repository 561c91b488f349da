"""The chunks of vLLM's host memory as entries of stores, and their names; imports no vLLM.

A chunk is a row of that memory: for each layer in turn, the blocks of ``tokens`` tokens, one after another.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

import ml
from kvcache.cache import NotSupportedError
from kvcache.integrations.vllm.naming import Pages, Request, RequestKeys
from kvcache.integrations.vllm.packing import Strides
from kvcache.integrations.vllm.pages import PageFormat, RawPages, TokenPages
from kvcache.stores import SerializedSnapshot, digest_of

__all__ = ["BlockLayer", "ChunkRows", "HashNames", "TokenNames", "layout_of", "raw_rows", "token_rows"]

log = logging.getLogger("kvcache")

_UNRELATED = frozenset({"extra_config", "engine_id", "enable_kv_cache_events", "model"})
"""Fields of vLLM's OffloadingConfig that say nothing of a row's content; the model is in the identity."""


def layout_of(config: Any, version: str) -> str:
    """What the bytes of a row depend on besides the model, of vLLM's ``OffloadingConfig``, as JSON."""
    named = {
        field.name: getattr(config, field.name) for field in fields(config) if field.name not in _UNRELATED
    }
    named["parallel"] = {
        name: value
        for name, value in asdict(config.parallel).items()
        if name.endswith("_size") and not name.startswith("data_parallel")
    }
    named["groups"] = [asdict(group) for group in config.groups]
    named["cache"] = asdict(config.cache)
    return json.dumps({"vllm": version, "dtype": config.model.dtype, **named}, sort_keys=True)


@dataclass(frozen=True)
class ChunkRows:
    """The entries of chunks: ``pages`` over ``views`` of a row, uint8 (bytes,)."""

    pages: PageFormat
    views: Callable[[np.ndarray], list[np.ndarray]]
    """The arrays of a page as views of a row, (blocks, ...) each."""

    def pack(self, end: int, row: np.ndarray) -> SerializedSnapshot:
        """The entry of a chunk whose last token is at ``end - 1``, a view of the row where they are alike."""
        arrays = [view.reshape(-1, *view.shape[2:]) for view in self.views(row)]
        return self.pages.pack(end - self.pages.tokens, arrays)

    def fill(self, end: int, entry: SerializedSnapshot, row: np.ndarray) -> None:
        """Write an entry into a row. Raises SnapshotCorruptError, before anything is written, for an entry of
        anything else.
        """
        arrays = self.pages.unpack(end - self.pages.tokens, entry)
        for view, array in zip(self.views(row), arrays, strict=True):
            view[...] = array.reshape(view.shape)


def raw_rows(nbytes: int, layout: str) -> ChunkRows:
    """Rows byte for byte, of whatever caches, groups and ranks."""
    return ChunkRows(RawPages(0, 1, (nbytes,), layout), lambda row: [row[None, None]])


@dataclass(frozen=True)
class BlockLayer:
    """Where a block of one layer has K and V of its tokens; lengths in elements."""

    heads: int
    key_dim: int
    value_dim: int
    size: int
    """The block's size."""
    key: Strides
    value: Strides


def token_rows(dtype: ml.DType, tokens: int, count: int, layers: list[BlockLayer]) -> ChunkRows:
    """Rows as pages of ``count`` blocks of ``tokens`` tokens each, K and V by token as in our caches."""
    width = dtype.numpy.itemsize
    widths = tuple(((layer.heads, layer.key_dim), (layer.heads, layer.value_dim)) for layer in layers)
    starts = np.cumsum([0, *(count * layer.size for layer in layers)])

    def views(row: np.ndarray) -> list[np.ndarray]:
        words = row[: int(starts[-1]) * width].view(dtype.numpy)
        return [
            np.lib.stride_tricks.as_strided(
                words[start + strides.offset :],
                (count, tokens, layer.heads, dim),
                [step * width for step in (layer.size, *strides.steps)],
            )
            for start, layer in zip(starts.tolist(), layers, strict=False)
            for strides, dim in ((layer.key, layer.key_dim), (layer.value, layer.value_dim))
        ]

    return ChunkRows(TokenPages(tokens * count, dtype, widths), views)


class HashNames:
    """Names made of vLLM's hashes, which cover a request's tokens, salt and images, and an adapter's name."""

    def __init__(self, identity: Mapping[str, Any], layout: str) -> None:
        self._identity, self._layout, self._reset = dict(identity), layout, ""

    def of(self, key: bytes, request: str, end: int | None) -> str | None:
        return digest_of("vLLM chunk", self._identity, self._layout, self._reset, key)

    def finished(self, request: str) -> None:
        """A no-op: nothing is kept of a request."""

    def reset(self) -> None:
        self._reset = secrets.token_hex(16)


class TokenNames:
    """Names made of requests' tokens, as ``KVCacheConnector`` names pages: ``pages`` by group of layers."""

    def __init__(self, pages: Mapping[int, Pages]) -> None:
        self._pages = pages
        self._requests: dict[str, dict[int, RequestKeys]] = {}
        self._said: set[str] = set()

    def begin(self, request: Request) -> None:
        """A request, before anything asks for its names; one that keys cannot identify has none."""
        try:
            keys = {group: pages.of(request) for group, pages in self._pages.items()}
        except NotSupportedError as error:
            if str(error) not in self._said:
                self._said.add(str(error))
                log.warning("a request is neither stored nor looked up: %s", error)
            keys = {}
        self._requests[request.request_id] = keys

    def of(self, key: bytes, request: str, end: int | None) -> str | None:
        group = int.from_bytes(key[-4:], "big")
        keys = self._requests.get(request, {}).get(group)
        tokens = self._pages[group].tokens
        if keys is None or not end or end % tokens:  # part of a chunk, which vLLM keeps to itself
            return None
        return keys.upto(end)[0][-1]

    def finished(self, request: str) -> None:
        self._requests.pop(request, None)

    def reset(self) -> None:
        for pages in self._pages.values():
            pages.reset()
        self._requests = {request: {} for request in self._requests}  # their tokens mix both sets of weights
