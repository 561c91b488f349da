"""vLLM's cache on this rank: blocks of all layers, copied to and from pages. Imports PyTorch."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

import ml
from kvcache.integrations.vllm.chunks import BlockLayer
from kvcache.integrations.vllm.packing import Strides, digits, places, strides_of
from kvcache.integrations.vllm.pages import PageFormat, RawPages, TokenPages

__all__ = ["CacheLayer", "Fill", "PagedCache", "block_layers", "find_pages"]

log = logging.getLogger("kvcache")

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_DTYPES = {torch.float32: ml.DType.F32, torch.float16: ml.DType.F16, torch.bfloat16: ml.DType.BF16}

Fill = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""``fill(key, value, cache, slots)``: vLLM's kernel that writes K and V (tokens, heads, dim) to slots."""


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """One layer of vLLM's cache: ``cache`` (blocks, heads, tokens, content), and data of its spec."""

    name: str
    cache: torch.Tensor
    heads: int
    key_dim: int
    value_dim: int
    fill: Fill | None
    """None: how its backend stores K and V is unknown."""


class _Strided:
    """K and V by token as strided views."""

    def __init__(self, words: torch.Tensor, tokens: int, layer: CacheLayer, pair: Sequence[Strides]) -> None:
        self._views = [
            words.as_strided(
                (words.shape[0], *shape),
                (words.stride(0), *strides.steps),
                words.storage_offset() + strides.offset,
            )
            for shape, strides in zip(_shapes(layer, tokens), pair, strict=True)
        ]

    def gather(self, blocks: torch.Tensor) -> list[torch.Tensor]:
        return [view.index_select(0, blocks).flatten(0, 1) for view in self._views]

    def scatter(self, blocks: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        for view, part in zip(self._views, parts, strict=True):
            view.index_copy_(0, blocks, part.view(blocks.numel(), *view.shape[1:]))


class _Scattered:
    """K and V by token, with an index for each element of a block."""

    def __init__(self, words: torch.Tensor, tokens: int, layer: CacheLayer, where: np.ndarray) -> None:
        self._words, self._where = words, torch.from_numpy(where).to(words.device)
        self._shapes = _shapes(layer, tokens)

    def gather(self, blocks: torch.Tensor) -> list[torch.Tensor]:
        flat = self._words.index_select(0, blocks).flatten(1).index_select(1, self._where)
        keys = int(np.prod(self._shapes[0]))
        halves = zip((flat[:, :keys], flat[:, keys:]), self._shapes, strict=True)
        return [half.reshape(-1, *shape[1:]) for half, shape in halves]

    def scatter(self, blocks: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        flat = torch.cat([part.reshape(blocks.numel(), -1) for part in parts], 1)
        whole = self._words.index_select(0, blocks).flatten(1)
        whole.index_copy_(1, self._where, flat)
        self._words.index_copy_(0, blocks, whole.view(-1, *self._words.shape[1:]))


class _Raw:
    """Blocks byte for byte."""

    def __init__(self, words: torch.Tensor) -> None:
        self._words = words

    def gather(self, blocks: torch.Tensor) -> list[torch.Tensor]:
        return [self._words.index_select(0, blocks).flatten(1).view(torch.uint8)]

    def scatter(self, blocks: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        words = parts[0].view(self._words.dtype)
        self._words.index_copy_(0, blocks, words.view(blocks.numel(), *self._words.shape[1:]))


_Blocks: TypeAlias = _Strided | _Scattered | _Raw
"""The mapping between one layer's blocks and a page."""


def find_pages(
    layers: Sequence[CacheLayer], block_size: int, blocks: int, tokens: int, layout: str, raw: bool = False
) -> PagedCache:
    """The format of pages of ``tokens`` tokens over a cache of ``blocks`` blocks of ``block_size`` tokens. K
    and V by token if their places can be determined and ``raw`` is not set; else blocks byte for byte, which
    only a backend with the same ``layout`` can read.
    """
    ratio = layers[0].cache.shape[0] // blocks
    small = block_size // ratio
    made: list[_Blocks] = []
    dtypes = {_DTYPES.get(layer.cache.dtype) for layer in layers}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    for layer in layers if dtype is not None and not raw else ():
        by_token = _by_token(layer, small)
        if by_token is None:
            log.warning(
                "%s: its attention backend stores K and V in an unknown order; pages are raw",
                layer.name,
            )
            break
        made.append(by_token)
    pages: PageFormat
    if dtype is not None and len(made) == len(layers):
        widths = tuple(((la.heads, la.key_dim), (la.heads, la.value_dim)) for la in layers)
        pages = TokenPages(tokens, dtype, widths)
        parts = 2
    else:
        made = [_Raw(_words(layer.cache)) for layer in layers]
        sizes = tuple(layer.cache[0].numel() * layer.cache.element_size() for layer in layers)
        pages = RawPages(tokens, tokens // small, sizes, f"{layout}, {small} tokens")
        parts = 1
    return PagedCache(pages, made, parts, ratio, layers[0].cache.device)


def _words(cache: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, so that every bit pattern is copied unchanged."""
    return cache.view(_WORDS[cache.element_size()])


def _by_token(layer: CacheLayer, tokens: int) -> _Blocks | None:
    where = _probe(layer, tokens)
    if where is None:
        return None
    strides = _strides(layer, tokens, where)
    if strides is not None:
        return _Strided(_words(layer.cache), tokens, layer, strides)
    return _Scattered(_words(layer.cache), tokens, layer, where)


def block_layers(layers: Sequence[CacheLayer], tokens: int) -> tuple[ml.DType, list[BlockLayer]] | None:
    """Where blocks of ``tokens`` tokens have K and V; None unless all layers are of one dtype, lie in order,
    and have them at strides.
    """
    dtypes = {_DTYPES.get(layer.cache.dtype) for layer in layers}
    dtype = dtypes.pop()
    made: list[BlockLayer] = []
    for layer in layers:
        size = layer.cache[0].numel()
        where = _probe(layer, tokens) if layer.cache.stride(0) == size else None
        strides = None if where is None else _strides(layer, tokens, where)
        if strides is None:
            return None
        made.append(BlockLayer(layer.heads, layer.key_dim, layer.value_dim, size, *strides))
    return None if dtype is None or dtypes else (dtype, made)


def _shapes(layer: CacheLayer, tokens: int) -> list[tuple[int, int, int]]:
    return [(tokens, layer.heads, dim) for dim in (layer.key_dim, layer.value_dim)]


def _strides(layer: CacheLayer, tokens: int, where: np.ndarray) -> tuple[Strides, Strides] | None:
    """The strides of K and of V in a block, from the places of their elements."""
    logical = np.unravel_index(where, tuple(layer.cache.shape[1:]))
    lies = sum(index * step for index, step in zip(logical, layer.cache.stride()[1:], strict=True))
    shapes = _shapes(layer, tokens)
    parts = np.split(np.asarray(lies), [int(np.prod(shapes[0]))])
    key, value = (strides_of(part.reshape(shape)) for part, shape in zip(parts, shapes, strict=True))
    return None if key is None or value is None else (key, value)


def _probe(layer: CacheLayer, tokens: int) -> np.ndarray | None:
    """The place of each element of K, then of V, in a block (heads, tokens, content); None if unknown."""
    cache, shapes = layer.cache, _shapes(layer, tokens)
    count = sum(int(np.prod(shape)) for shape in shapes)
    strides = cache.stride()
    order = sorted(range(1, 4), key=lambda axis: -strides[axis])
    scratch = cache.new_zeros((2, *(cache.shape[axis] for axis in order)))
    scratch = scratch.permute(0, *(order.index(axis) + 1 for axis in range(1, 4)))
    if layer.fill is None:
        return None
    keys = int(np.prod(shapes[0]))
    slots = torch.arange(tokens, 2 * tokens, dtype=torch.int64, device=cache.device)
    planes = []
    for plane in digits(count):
        numbers = torch.from_numpy(plane).to(cache.device, cache.dtype)
        key, value = numbers[:keys].view(shapes[0]), numbers[keys:].view(shapes[1])
        scratch.zero_()
        try:
            layer.fill(key, value, scratch, slots)
        except Exception as error:
            log.warning("%s: %s", layer.name, error)
            return None
        planes.append(scratch[1].float().cpu().reshape(-1).numpy().copy())
    return places(planes, count)


@dataclass(eq=False)
class _Copied:
    arrays: Sequence[np.ndarray]
    event: Any = None

    def ready(self) -> bool:
        return self.event is None or bool(self.event.query())


class PagedCache:
    """Copies blocks to pages and pages to blocks; ``scatter`` may be called from any thread."""

    def __init__(
        self, pages: PageFormat, layers: Sequence[_Blocks], parts: int, ratio: int, device: torch.device
    ) -> None:
        """``parts``: the arrays of a page for each layer; ``ratio``: the number of kernel blocks in one block
        of vLLM.
        """
        self.pages = pages
        self._layers, self._parts, self._ratio, self._device = layers, parts, ratio, device
        self._followed: Any = None
        """The last event recorded by ``follow``, on a device with streams."""
        self._dtype: Any = pages.dtype.numpy if isinstance(pages, TokenPages) else np.dtype(np.uint8)

    @property
    def settings(self) -> Mapping[str, Any]:
        """Everything that determines the content of a page, JSON-able."""
        if isinstance(self.pages, TokenPages):
            return {"kind": "CausalCache", "dtype": self.pages.dtype.name}
        return {"kind": "vLLM blocks", "layout": self.pages.layout, "layers": [*self.pages.layers]}

    def gather(self, blocks: Sequence[int]) -> _Copied:
        ids = self._ids(blocks)
        parts = [part for layer in self._layers for part in layer.gather(ids)]
        event = None
        if self._device.type != "cpu":
            parts = [_to_host(part) for part in parts]
            event = torch.Event(self._device)
            event.record()
        return _Copied([part.numpy().view(self._dtype) for part in parts], event)

    def follow(self) -> None:
        if self._device.type != "cpu":
            event = torch.Event(self._device)
            event.record()
            self._followed = event  # assigned atomically: loading threads read it

    def scatter(self, blocks: Sequence[int | None], arrays: Sequence[np.ndarray]) -> None:
        wanted = [i for i, block in enumerate(blocks) if block is not None]
        ids = self._ids([block for block in blocks if block is not None])
        if not wanted:
            return
        with self._beside() as stream:
            for number, layer in enumerate(self._layers):
                own = arrays[number * self._parts : (number + 1) * self._parts]
                layer.scatter(ids, [self._part(array, wanted, len(blocks)) for array in own])
            if stream is not None:
                stream.synchronize()

    def _ids(self, blocks: Sequence[int]) -> torch.Tensor:
        """The kernel blocks of vLLM's blocks."""
        ids = torch.tensor([*blocks], dtype=torch.int64).reshape(-1, 1) * self._ratio
        return (ids + torch.arange(self._ratio)).reshape(-1).to(self._device)

    def _part(self, array: np.ndarray, wanted: Sequence[int], count: int) -> torch.Tensor:
        """The rows of an array of ``count`` blocks that belong to the wanted blocks."""
        rows = array.shape[0] // count
        if len(wanted) < count:
            array = np.concatenate([array[i * rows : (i + 1) * rows] for i in wanted])
        words = np.array(array, order="C").view(f"i{array.dtype.itemsize}" if array.itemsize > 1 else "u1")
        return torch.from_numpy(words).to(self._device)

    @contextlib.contextmanager
    def _beside(self) -> Any:
        """A separate stream, ordered after the last ``follow``; None on a CPU. No pass waits for it."""
        if self._device.type == "cpu":
            yield None
            return
        stream = torch.Stream(self._device)
        if self._followed is not None:
            stream.wait_event(self._followed)
        with stream:
            yield stream


def _to_host(part: torch.Tensor) -> torch.Tensor:
    host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
    return host.copy_(part, non_blocking=True)
