"""Attention over quantized storage, by kernels and block by block: attention over what is read back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ml
from backends import cpu_attention, cpu_store
from backends.numpy.backend import NumpyBackend
from kvcache import Batch, CausalCache, SlidingWindowCache
from kvcache.attention import attend as attending
from kvcache.storage.quantized import QuantizedBuffer
from ml import nn

HEADS, KV_HEADS, DIM, V_DIM = 4, 2, 64, 32


KERNELS = "by the kernels of numba"


@pytest.fixture(
    params=["numpy", "torch", "mlx", *(f"{name} {KERNELS}" for name in ("numpy", "torch", "mlx"))]
)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ml.Backend]:
    name, _, how = request.param.partition(" ")
    if not any(info.name == name and info.available for info in ml.available_backends()):
        pytest.skip(f"{name} cannot run here")
    if how:
        pytest.importorskip("numba")
        monkeypatch.setattr(attending, "attend_quantized", lambda *_: pytest.fail("read back in blocks"))
    else:
        monkeypatch.setattr(cpu_attention, "kernels", lambda: None)
        monkeypatch.setattr(cpu_store, "_kernel", lambda: None)
    with ml.open_backend(name) as backend:
        yield backend


def caches(
    backend: ml.Backend, codec: ml.DType | str, window: int | None, **config: int
) -> list[CausalCache]:
    """One that stores codes, and one of F32 that is given what the first reads back."""
    made = []
    for dtype in (codec, ml.DType.F32):
        cache = CausalCache() if window is None else SlidingWindowCache(window)
        cache.init(backend, dtype, 4, 160, 160)
        if dtype is codec:  # the first
            cache.set_config(ml.CacheConfig(layout=backend_layout(backend), call_bytes=1, **config))
        made.append(cache)
    return made


def backend_layout(backend: ml.Backend) -> ml.Layout:
    return ml.Layout.TOKEN_MAJOR if backend.name == "numpy" else ml.Layout.HEAD_MAJOR


class Pair:
    """The two caches, given the same."""

    def __init__(
        self, backend: ml.Backend, codec: ml.DType | str, window: int | None = None,
        activations: ml.DType = ml.DType.F32, **config: int,
    ) -> None:  # fmt: skip
        self.codes, self.plain = caches(backend, codec, window, **config)
        self.ctx, self.rng = backend.new_context(), np.random.default_rng(3)
        self.activations = activations

    def normal(self, *shape: int) -> ml.Tensor:
        return self.ctx.from_numpy(self.rng.standard_normal(shape).astype(np.float32), self.activations)

    def step(self, lengths: dict[int, int]) -> float:
        """Extend sequences in one batch; how far the two attend apart."""
        ctx = self.ctx
        pairs = [(self.codes.offset(seq) + i, seq) for seq, count in lengths.items() for i in range(count)]
        count = len(pairs)
        key, value, query = (
            self.normal(count, *s) for s in ((KV_HEADS, DIM), (KV_HEADS, V_DIM), (HEADS, DIM))
        )
        batch = Batch([position for position, _ in pairs], [seq for _, seq in pairs])
        for cache in (self.codes, self.plain):
            cache.start_forward(ctx, batch)
        self.codes.put(ctx, key, value)
        stored = self.codes.storage.buffers[0]
        cells = self.codes.pass_under_way().targets(ctx)  # type: ignore[union-attr]
        self.plain.put(ctx, *stored.read(ctx, cells, count))
        found, expected = (cache.attend(ctx, query, 0.2).to_numpy() for cache in (self.codes, self.plain))
        return float(np.abs(found - expected).max())


@pytest.mark.parametrize("codec", [ml.DType.Q8_0, ml.DType.Q4_0], ids=lambda codec: codec.name)
@pytest.mark.parametrize("padding", [1, 8])
@pytest.mark.parametrize("window", [None, 50])
def test_blocks_come_to_attention_over_all_that_is_read_back(
    backend: ml.Backend, codec: ml.DType, padding: int, window: int | None
) -> None:
    """A prompt of several blocks, a part of one after it, steps of sequences of other lengths, a fork."""
    pair = Pair(backend, codec, window, cache_padding=padding)
    assert pair.step({0: 100}) < 1e-5
    assert pair.step({0: 40, 1: 33}) < 1e-5
    for _ in range(2):
        assert pair.step({1: 1, 0: 1, 2: 1}) < 1e-5
    for cache in (pair.codes, pair.plain):
        cache.copy_prefix(0, 3, 130 if window is None else cache.offset(0))
    assert pair.step({3: 3, 0: 1, 2: 20}) < 1e-5
    assert pair.step({3: 1, 0: 1, 1: 1}) < 1e-5


@pytest.mark.parametrize("length", [12, 40])
def test_sequences_of_one_length_are_one_call_in_as_many_blocks_as_they_need(
    backend: ml.Backend, length: int
) -> None:
    pair = Pair(backend, ml.DType.Q8_0)
    pair.step(dict.fromkeys(range(4), length))
    assert pair.step(dict.fromkeys(range(4), 1)) < 1e-5


def test_a_kernel_that_declines_is_asked_again_with_fewer_segments_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def decline(
        self: Any, ctx: Any, query: Any, key: Any, value: Any, plan: ml.RaggedPlan, *rest: Any
    ) -> None:
        if len(rest) > 2:  # over codes; the cache of plain numbers beside it asks as well
            asked.append(len(plan.segments))

    monkeypatch.setattr(NumpyBackend, "ragged_attention", decline)
    with ml.open_backend("numpy") as opened:
        pair = Pair(opened, ml.DType.Q8_0)
        steps = {0: 20, 1: 20, 2: 20}, {0: 1, 1: 1, 2: 1}, {0: 1, 1: 1}, {0: 1, 1: 1, 2: 1}, {0: 1}, {1: 1}
        for lengths in steps:
            assert pair.step(lengths) < 1e-5
    assert asked == [3, 2, 1]


@pytest.mark.parametrize("backend", ["numpy", "torch", "mlx"], indirect=True)
@pytest.mark.parametrize("codec", ["F8_E4M3", "AFFINE8_32", "Q8_0"])
@pytest.mark.parametrize("activations", [ml.DType.F16, ml.DType.BF16], ids=lambda dtype: dtype.name)
def test_queries_in_narrow_floats_may_see_nothing_of_a_block(
    backend: ml.Backend, codec: str, activations: ml.DType
) -> None:
    pair = Pair(backend, codec, 15, activations, cache_padding=64)
    assert pair.step({0: 100, 1: 3}) < 2e-2


@pytest.mark.parametrize("backend", ["numpy", "torch", "mlx"], indirect=True)
def test_no_more_than_a_block_is_read_back_at_a_time(
    backend: ml.Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(backend, ml.DType.Q8_0)
    pair.step({0: 150, 1: 120})
    read: list[int] = []
    original = QuantizedBuffer.decode

    def spy(self: QuantizedBuffer, ctx: ml.Context, parts: list[ml.Tensor]) -> ml.Tensor:
        read.append(math.prod(parts[0].shape[:-1]) // KV_HEADS)
        return original(self, ctx, parts)

    monkeypatch.setattr(QuantizedBuffer, "decode", spy)
    pair.step({0: 1, 1: 1})
    assert max(read) <= attending.LEAST
    assert 2 * (151 + 121) <= sum(read) <= 2 * (151 + 121 + attending.LEAST)  # keys and values


@pytest.mark.parametrize("count", [1, 2, 5])
def test_parts_merge_into_a_part_of_the_whole(backend: ml.Backend, count: int) -> None:
    rng = np.random.default_rng(4)
    with backend.new_context() as ctx:
        query, key, value = (
            rng.standard_normal(shape).astype(np.float32)
            for shape in ((1, 3, HEADS, DIM), (1, 40, KV_HEADS, DIM), (1, 40, KV_HEADS, V_DIM))
        )
        cuts = [0, *sorted(rng.choice(np.arange(1, 40), count - 1, replace=False).tolist()), 40]

        def part(start: int, stop: int) -> nn.Part:
            tensors = (ctx.from_numpy(np.ascontiguousarray(x[:, start:stop])) for x in (key, value))
            return nn.partial_attention(ctx, ctx.from_numpy(query), *tensors, None, 0.2)

        merged = nn.merge_parts(ctx, [part(*cut) for cut in itertools.pairwise(cuts)])
        for found, expected in zip(merged, part(0, 40), strict=True):
            np.testing.assert_allclose(found.to_numpy(), expected.to_numpy(), rtol=1e-5, atol=1e-6)
