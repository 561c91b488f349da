"""The connector's pages: what every cache of ours writes and reads, and what is made of vLLM's blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import ml
from kvcache import Batch, CausalCache, PrefixCache
from kvcache.integrations.vllm import paged_cache
from kvcache.integrations.vllm.naming import Pages
from kvcache.integrations.vllm.packing import digits, places, strides_of
from kvcache.integrations.vllm.paged_cache import CacheLayer, Fill, PagedCache, find_pages
from kvcache.integrations.vllm.pages import RawPages, TokenPages
from kvcache.stores import MemoryStore, SnapshotCorruptError, get_snapshot, pack, put_snapshot, unpack

TOKENS, LAYERS, HEADS, DIM = 16, 2, 2, 8
WIDTHS = ((HEADS, DIM), (HEADS, DIM))
PROMPT = [*range(3, 3 + 3 * TOKENS + 5)]


def values(layer: int, half: int, position: int) -> np.ndarray:
    """K or V of one token; integers that BF16 holds."""
    shape = np.arange(HEADS * DIM).reshape(HEADS, DIM)
    return (shape + 100 * layer - 50 * half + position).astype(np.float32)


def page_arrays(begin: int, dtype: ml.DType) -> list[np.ndarray]:
    spans = range(begin, begin + TOKENS)
    return [
        np.stack([values(layer, half, position) for position in spans]).astype(dtype.numpy)
        for layer in range(LAYERS)
        for half in range(2)
    ]


def forward(cache: Any, ctx: ml.Context, seq: int, positions: Sequence[int]) -> None:
    cache.start_forward(ctx, Batch(positions, [seq] * len(positions)))
    for layer in range(LAYERS):
        cache.set_layer(layer)
        halves = [np.stack([values(layer, half, position) for position in positions]) for half in range(2)]
        cache.put(ctx, *(ctx.from_numpy(half) for half in halves))


def bare(tokens: Sequence[int], salt: str | None = None) -> Any:
    plain = {"lora_request": None, "mm_features": (), "prompt_embeds": None}
    return SimpleNamespace(all_token_ids=[*tokens], cache_salt=salt, **plain)


@pytest.mark.parametrize("name", ["numpy", "torch", "mlx"])
@pytest.mark.parametrize("dtype", [ml.DType.F32, ml.DType.BF16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("salt", ["", "tenant"])
def test_pages_are_those_of_a_prefix_cache_both_ways(
    backends: Callable[[str], ml.Backend], name: str, dtype: ml.DType, salt: str
) -> None:
    backend, store, identity = backends(name), MemoryStore(), {"model": "m"}
    pages = TokenPages(TOKENS, dtype, (WIDTHS,) * LAYERS)
    names = Pages(identity, {"kind": "CausalCache", "dtype": dtype.name}, TOKENS)
    keys = names.keys(bare(PROMPT, salt or None), len(PROMPT))[0]
    for page in range(2):  # two pages are the connector's
        put_snapshot(store, keys[page], pages.pack(page * TOKENS, page_arrays(page * TOKENS, dtype)))

    cache = CausalCache()
    cache.init(backend, dtype, max_sequences=2, capacity=128, max_batch=64)
    options: dict[str, Any] = {"tiers": [store], "identity": identity, "block_size": TOKENS}
    with PrefixCache(cache, **options) as prefix, backend.new_context() as ctx:
        with prefix.begin(PROMPT, salt) as session:
            assert session.cached == 2 * TOKENS
            forward(cache, ctx, session.seq, range(session.cached, len(PROMPT)))
            for layer in range(LAYERS):
                cache.set_layer(layer)
                found = [half.to_numpy().astype(np.float32) for half in cache.get(ctx)[:2]]
                for half, array in enumerate(found):
                    expected = [values(layer, half, position) for position in range(len(PROMPT))]
                    np.testing.assert_array_equal(array[: len(PROMPT)], np.stack(expected))
        prefix.flush()
    found_page = get_snapshot(store, keys[2])  # the third is the cache's
    arrays = pages.unpack(2 * TOKENS, found_page)
    for array, expected in zip(arrays, page_arrays(2 * TOKENS, dtype), strict=True):
        np.testing.assert_array_equal(array, expected)
    assert names.keys(bare(PROMPT, "other"), len(PROMPT))[0] != keys


def test_raw_pages_are_of_their_layout_alone() -> None:
    pages = RawPages(TOKENS, 2, (6, 4), "layout")
    arrays = [np.arange(2 * size, dtype=np.uint8).reshape(2, size) for size in pages.layers]
    page = unpack(b"".join(bytes(part) for part in pack(pages.pack(16, arrays))))
    assert page.nbytes == pages.nbytes
    for found, array in zip(pages.unpack(16, page), arrays, strict=True):
        np.testing.assert_array_equal(found, array)
    others = [RawPages(TOKENS, 2, (6, 4), "other"), RawPages(TOKENS, 2, (6, 5), "layout")]
    for other in (*others, RawPages(TOKENS, 1, (6, 4), "layout"), RawPages(TOKENS, 2, (6,), "layout")):
        with pytest.raises(SnapshotCorruptError):
            other.unpack(16, page)
    with pytest.raises(SnapshotCorruptError):
        pages.unpack(0, page)


# Where a kernel puts what.


def test_numbers_in_digits_that_small_floats_hold() -> None:
    planes = digits(40_000)
    assert len(planes) == 3
    for plane in planes:
        assert np.array_equal(torch.from_numpy(plane).bfloat16().float().numpy(), plane)
    order = np.random.default_rng(0).permutation(40_000)
    held = [plane[order] for plane in planes]
    found = places(held, 40_000)
    assert found is not None
    np.testing.assert_array_equal(order[found], np.arange(40_000))


def test_blocks_that_do_not_hold_each_number_once_tell_nothing() -> None:
    planes = digits(300)
    assert places(planes, 300) is not None
    for damage in (
        lambda p: p * 0,
        lambda p: np.where(p == 5, 6, p),
        lambda p: p * 0.9,
        lambda p: p * np.inf,
    ):
        assert places([damage(plane) for plane in planes], 300) is None
    assert places([planes[0], planes[1] * (planes[0] > 3)], 300) is None
    assert places([plane[:-1] for plane in planes], 300) is None


def test_even_steps_are_found() -> None:
    block = np.arange(4 * 3 * 5).reshape(4, 3, 5)
    for axes in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        shape = [block.shape[axis] for axis in axes]
        where = block.transpose(axes)
        found = strides_of(where + 7)
        assert found is not None
        grid = np.indices(shape)
        expected = found.offset + sum(step * grid[i] for i, step in enumerate(found.steps))
        np.testing.assert_array_equal(where + 7, expected)
    block[1, 1, 1] += 1
    assert strides_of(block) is None
    assert strides_of(np.full((1, 1, 1), 9)) == (9, (0, 0, 0))


# Kernels as backends have them, in PyTorch; each says where (head, token, dim) of K and V goes in a block.

BLOCK, COUNT = 8, 6


def _dense(
    cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: int, at: int, token: int
) -> None:
    cache[block, :, at, :DIM], cache[block, :, at, DIM:] = key[token], value[token]


def _transposed(cache: torch.Tensor, key: Any, value: Any, block: int, at: int, token: int) -> None:
    """The CPU's: keys (dim, token), then values (token, dim), each one half of the block."""
    small = cache.shape[2]
    halves = cache.view(cache.shape[0], HEADS, 2, small * DIM)
    halves[block, :, 0].view(HEADS, DIM, small)[:, :, at] = key[token]
    halves[block, :, 1].view(HEADS, small, DIM)[:, at] = value[token]


def _interleaved(cache: torch.Tensor, key: Any, value: Any, block: int, at: int, token: int) -> None:
    """Pairs of tokens side by side, as matrix units want them, in an order that is no even steps."""
    small = cache.shape[2]
    halves = cache.view(cache.shape[0], HEADS, 2, small * DIM)
    order = torch.randperm(small * DIM, generator=torch.Generator().manual_seed(3)).view(small, DIM)
    halves[block, :, 0][:, order[at]] = key[token]
    halves[block, :, 1].view(HEADS, small, DIM)[:, at] = value[token]


def _lossy(cache: torch.Tensor, key: Any, value: Any, block: int, at: int, token: int) -> None:
    _dense(cache, key * 0.3, value, block, at, token)


def _refusing(*given: Any) -> None:
    raise RuntimeError("unknown layout")


KERNELS: dict[str, Any] = {
    "dense": _dense,
    "transposed": _transposed,
    "interleaved": _interleaved,
    "lossy": _lossy,
    "refusing": _refusing,
}


def fill_of(name: str) -> Fill:
    def fill(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        small = cache.shape[2]
        for token, slot in enumerate(slots.tolist()):
            KERNELS[name](cache, key, value, slot // small, slot % small, token)

    return fill


def make_layers(name: str, dtype: torch.dtype, order: tuple[int, ...], ratio: int) -> list[CacheLayer]:
    """Caches (blocks, heads, tokens, content) whose axes lie in memory in this order."""
    shape = (COUNT * ratio, HEADS, BLOCK // ratio, 2 * DIM)
    layers = []
    for number in range(LAYERS):
        memory = torch.full([shape[axis] for axis in order], -1.0, dtype=dtype)
        cache = memory.permute(*(order.index(axis) for axis in range(4)))
        layers.append(CacheLayer(f"layers.{number}", cache, HEADS, DIM, DIM, fill_of(name)))
    return layers


def find(layers: list[CacheLayer], raw: bool = False) -> PagedCache:
    return find_pages(layers, BLOCK, COUNT, TOKENS, "layout", raw)


CASES = [
    ("dense", (0, 1, 2, 3), 1),
    ("dense", (0, 2, 1, 3), 1),
    ("dense", (1, 0, 2, 3), 1),
    ("dense", (0, 1, 2, 3), 2),
    ("transposed", (0, 1, 2, 3), 1),
    ("transposed", (0, 1, 2, 3), 2),
    ("interleaved", (0, 1, 2, 3), 1),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "order", "ratio"), CASES, ids=str)
def test_blocks_become_pages_by_token_and_pages_blocks(
    name: str, order: tuple[int, ...], ratio: int, dtype: torch.dtype
) -> None:
    """Written by the kernel into one cache, carried over, and equal to what it writes into another."""
    layers, others = (make_layers(name, dtype, order, ratio) for _ in range(2))
    pool = [4, 1]
    slots = torch.tensor([pool[token // BLOCK] * BLOCK + token % BLOCK for token in range(TOKENS)])
    written = page_arrays(32, ml.DType.F32)
    for number, layer in enumerate(layers):
        key, value = (torch.from_numpy(array).to(dtype) for array in written[2 * number : 2 * number + 2])
        assert layer.fill is not None
        layer.fill(key, value, layer.cache, slots)
    found = find(layers)
    assert isinstance(found.pages, TokenPages)
    assert found.settings == {"kind": "CausalCache", "dtype": found.pages.dtype.name}
    copied = found.gather(pool)
    assert copied.ready()
    for array, expected in zip(copied.arrays, written, strict=True):
        np.testing.assert_array_equal(array.astype(np.float32), expected)
    page = found.pages.pack(32, copied.arrays)

    to = find(others)
    before = [layer.cache.clone() for layer in others]
    to.scatter([None, 5], found.pages.unpack(32, page))
    to.scatter([2, 3], found.pages.unpack(32, page))
    to.scatter([None, None], found.pages.unpack(32, page))
    for layer, source, held in zip(others, layers, before, strict=True):
        blocks, originals, untouched = (
            one.unflatten(0, (COUNT, ratio)) for one in (layer.cache, source.cache, held)
        )
        assert torch.equal(blocks[2], originals[4])
        assert torch.equal(blocks[3], originals[1])
        assert torch.equal(blocks[5], originals[1])
        assert torch.equal(blocks[[0, 1, 4]], untouched[[0, 1, 4]])


@pytest.mark.parametrize("name", ["lossy", "refusing", "dense", "none"])
def test_blocks_of_which_nothing_is_known_go_as_they_are(name: str, caplog: pytest.LogCaptureFixture) -> None:
    layers = make_layers("dense" if name == "none" else name, torch.float32, (0, 2, 1, 3), 1)
    if name == "none":
        layers = [CacheLayer(one.name, one.cache, HEADS, DIM, DIM, None) for one in layers]
    found = find(layers, raw=name == "dense")
    assert isinstance(found.pages, RawPages)
    assert found.settings["kind"] == "vLLM blocks"
    assert ("pages are raw" in caplog.text) == (name != "dense")
    for number, layer in enumerate(layers):
        layer.cache.copy_(torch.arange(layer.cache.numel()).view(layer.cache.shape) + number)
    before = [layer.cache.clone() for layer in layers]
    page = found.pages.pack(16, found.gather([4, 1]).arrays)
    found.scatter([None, 0], found.pages.unpack(16, page))
    found.scatter([2, 3], found.pages.unpack(16, page))
    for layer, held in zip(layers, before, strict=True):
        assert torch.equal(layer.cache[[2, 3, 0]], held[[4, 1, 1]])
        assert torch.equal(layer.cache[[1, 4, 5]], held[[1, 4, 5]])


def test_bytes_that_pytorch_knows_by_other_names() -> None:
    layers = [
        CacheLayer("l", torch.zeros(COUNT, HEADS, BLOCK, DIM).to(torch.float8_e4m3fn), HEADS, DIM, DIM, None)
    ]
    found = find(layers)
    assert isinstance(found.pages, RawPages)
    assert found.pages.nbytes == TOKENS * HEADS * DIM
    assert found.gather([1, 2]).arrays[0].dtype == np.uint8


def test_nan_and_signs_are_carried_bit_for_bit() -> None:
    layers = make_layers("transposed", torch.float32, (0, 1, 2, 3), 1)
    found = find(layers)
    bits = torch.randint(-(2**31), 2**31 - 1, layers[0].cache.shape, dtype=torch.int32)
    layers[0].cache.view(torch.int32).copy_(bits)
    found.scatter([2, 3], found.pages.unpack(0, found.pages.pack(0, found.gather([4, 1]).arrays)))
    assert torch.equal(layers[0].cache.view(torch.int32)[[2, 3]], bits[[4, 1]])


def test_on_a_device_pages_are_written_behind_what_it_was_given_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks were another request's a moment ago: vLLM may be setting them to zero, or we be copying them."""
    late: list[Callable[[], object]] = []

    class Event:
        def __init__(self, device: Any) -> None:
            self.record = lambda: setattr(self, "behind", [*late])

    class Stream(contextlib.nullcontext[None]):
        def __init__(self, device: Any) -> None:
            super().__init__()
            self.synchronize = lambda: None

        def wait_event(self, event: Any) -> None:
            for work in event.behind:
                late.remove(work)
                work()

    layers = make_layers("dense", torch.float32, (0, 1, 2, 3), 1)
    found, on_host = find(layers), find(layers)
    page = found.pages.unpack(0, found.pages.pack(0, on_host.gather([1, 4]).arrays))
    monkeypatch.setattr(paged_cache.torch, "Stream", Stream)
    monkeypatch.setattr(paged_cache.torch, "Event", Event)
    for name in ("_ids", "_part"):
        monkeypatch.setattr(found, name, getattr(on_host, name))
    found._device = SimpleNamespace(type="cuda")  # type: ignore[assignment]
    late.append(lambda: [layer.cache[2:4].zero_() for layer in layers])
    found.follow()
    late.append(lambda: [layer.cache[5].zero_() for layer in layers])
    found.scatter([2, 3], page)
    for layer in layers:
        assert torch.equal(layer.cache[[2, 3]], layer.cache[[1, 4]])
        assert torch.all(layer.cache[5] == -1), "what came later is not waited for"
    assert len(late) == 1
