"""Attention over affine groups by MLX's products is that over what is read back, and reads no block back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ml
from kvcache import Batch, CausalCache, SlidingWindowCache
from kvcache.attention import attend as attending

pytest.importorskip("mlx.core")
mlx_quantized = pytest.importorskip("backends.mlx.quantized")

HEADS, KV_HEADS, DIM = 4, 2, 64
FORMATS = ("AFFINE4_32", "AFFINE8_64", "AFFINE8_32/AFFINE4_64", "ROTATED_AFFINE4_32")


@pytest.fixture
def backend() -> Iterator[ml.Backend]:
    with ml.open_backend("mlx", device="cpu") as found:
        yield found


class Layer:
    """A cache of one layer, fed with random numbers."""

    def __init__(
        self, backend: ml.Backend, dtype: str, window: int | None, config: ml.CacheConfig | None
    ) -> None:
        self.cache = CausalCache() if window is None else SlidingWindowCache(window)
        self.cache.init(backend, dtype, 4, 160, 160)
        if config is not None:
            self.cache.set_config(config)
        self.ctx, self.rng = backend.new_context(), np.random.default_rng(0)

    def normal(self, *shape: int) -> ml.Tensor:
        return self.ctx.from_numpy(self.rng.standard_normal(shape).astype(np.float32))

    def step(self, lengths: dict[int, int], sinks: bool = False) -> float:
        """Extend sequences in one batch; how far ``attend`` is from attention over what ``get`` reads."""
        ctx, cache = self.ctx, self.cache
        tokens = [(seq, cache.offset(seq) + i) for seq, count in lengths.items() for i in range(count)]
        cache.start_forward(ctx, Batch([at for _, at in tokens], [seq for seq, _ in tokens]))
        cache.put(ctx, self.normal(len(tokens), KV_HEADS, DIM), self.normal(len(tokens), KV_HEADS, DIM))
        query, logits = self.normal(len(tokens), HEADS, DIM), self.normal(HEADS) if sinks else None
        found = cache.attend(ctx, query, 0.125, logits).to_numpy()
        key, value, mask = cache.get(ctx)
        wanted = ml.nn.attention(ctx, query, key, value, mask, 0.125, logits).to_numpy()
        return float(np.abs(found - wanted).max())


@pytest.mark.parametrize("layout", list(ml.Layout), ids=lambda layout: layout.value)
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("dtype", FORMATS)
def test_batches_forks_and_windows(
    backend: ml.Backend, dtype: str, window: int | None, layout: ml.Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attending, "attend_quantized", lambda *_: pytest.fail("a block was read back"))
    layer = Layer(backend, dtype, window, ml.CacheConfig(layout=layout))
    assert layer.step({0: 20}) < 2e-5
    assert layer.step({0: 3, 1: 7, 2: 1}, sinks=True) < 2e-5
    layer.cache.copy_prefix(0, 3, layer.cache.offset(0))
    assert layer.step({3: 2, 0: 1, 1: 1}) < 2e-5
    assert layer.step({2: 1, 3: 1, 0: 1, 1: 1}, sinks=True) < 2e-5


def test_a_pass_of_many_segments_leaves_later_passes_their_products(
    backend: ml.Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlx_quantized, "MOST", 1)
    layer = Layer(backend, "AFFINE4_32", None, None)
    assert layer.step({0: 5, 1: 6}) < 2e-5
    monkeypatch.setattr(attending, "attend_quantized", lambda *_: pytest.fail("a block was read back"))
    assert layer.step({0: 1}) < 2e-5


def test_many_segments_and_other_formats_go_block_by_block(
    backend: ml.Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    original = mlx_quantized.quantized_attention

    def spy(*args: Any) -> Any:
        given.append(original(*args))
        return given[-1]

    monkeypatch.setattr("backends.mlx.backend.quantized_attention", spy)
    monkeypatch.setattr(mlx_quantized, "MOST", 1)
    assert Layer(backend, "AFFINE4_32", None, None).step({0: 5, 1: 6}) < 2e-5
    assert Layer(backend, "Q4_0/AFFINE4_32", None, None).step({0: 5}) < 2e-5
    assert given == [None, None]
