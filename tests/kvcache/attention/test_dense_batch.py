"""Several sequences read as one tensor: against a plain dictionary of (sequence, position) -> values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import ml
from kvcache import (
    Batch,
    CausalCache,
    DenseBatch,
    InvalidRangeError,
    InvalidSequenceError,
    OrderError,
    SequenceLostError,
    SlidingWindowCache,
)

from ...rigs.each_backend import each_backend

HEADS, DIM, VALUE_DIM = 2, 4, 3


backend = each_backend("numpy", "torch", "mlx")


class Written:
    """A cache, and a dictionary of what was put into its layers."""

    def __init__(self, backend: ml.Backend, cache: CausalCache, sequences: int = 3, **options: Any) -> None:
        self.ctx, self.cache = backend.new_context(), cache
        if "config" in options:
            cache.set_config(options["config"])
        dim = options.get("dim", DIM)
        self.dims = dim, options.get("value_dim", VALUE_DIM if dim == DIM else dim)
        dtype = options.get("dtype", ml.DType.F32)
        cache.init(backend, dtype, sequences, options.get("capacity", 16), options.get("max_batch", 16))
        self.held: dict[tuple[int, int, int], tuple[np.ndarray, np.ndarray]] = {}
        self.random = np.random.default_rng(0)

    def put(self, sequences: Sequence[int], positions: Sequence[int]) -> None:
        """The same new positions of all sequences."""
        pairs = [(seq, position) for seq in sequences for position in positions]
        self.cache.start_forward(self.ctx, Batch([at for _, at in pairs], [seq for seq, _ in pairs]))
        for layer in range(2):
            key, value = (
                self.random.standard_normal((len(pairs), HEADS, dim)).astype(np.float32) for dim in self.dims
            )
            self.cache.set_layer(layer)
            self.cache.put(self.ctx, self.ctx.from_numpy(key), self.ctx.from_numpy(value))
            for i, (seq, position) in enumerate(pairs):
                self.held[layer, seq, position] = key[i], value[i]

    def expect(self, sequences: Sequence[int], begin: int, end: int, tolerance: float = 0) -> DenseBatch:
        reading = DenseBatch(self.cache, sequences, begin)
        assert (reading.begin, reading.end, reading.tokens) == (begin, end, end - begin)
        for layer in range(2):
            for found, which in zip(reading.read(self.ctx, layer), (0, 1), strict=True):
                expected = np.array(
                    [[self.held[layer, seq, at][which] for at in range(begin, end)] for seq in sequences]
                ).transpose(0, 2, 1, 3)
                np.testing.assert_allclose(found.to_numpy(), expected, rtol=0, atol=tolerance)
        return reading


class TestReading:
    def test_sequences_that_grow_in_step_are_one_view(self, backend: ml.Backend) -> None:
        written = Written(backend, CausalCache())
        for positions in ([0, 1, 2], [3], [4, 5]):
            written.put([0, 1, 2], positions)
            reading = written.expect([0, 1, 2], 0, positions[-1] + 1)
            assert reading.is_view
        assert written.expect([0, 2], 2, 6).is_view
        assert written.expect([1], 0, 6).is_view

    def test_a_view_sees_what_is_written_later(self, backend: ml.Backend) -> None:
        written = Written(backend, CausalCache())
        written.put([0, 1], [0, 1])
        key, _ = written.cache.get(written.ctx)[:2]
        found, _ = DenseBatch(written.cache, [0, 1]).read(written.ctx, 1)
        written.ctx.from_numpy(np.zeros(key.shape, np.float32)).copy(written.ctx, key)
        assert not found.to_numpy().any()

    def test_other_orders_and_shared_cells_are_gathered(self, backend: ml.Backend) -> None:
        written = Written(backend, CausalCache(), sequences=4)
        written.put([0, 1, 2], [0, 1, 2, 3])
        assert not written.expect([2, 0, 1], 0, 4).is_view
        assert not written.expect([2, 0, 1, 1], 1, 4).is_view
        written.cache.copy_prefix(1, 3, 4)
        for at in range(4):
            for layer in range(2):
                written.held[layer, 3, at] = written.held[layer, 1, at]
        assert written.expect([1, 3], 0, 4).is_view  # the same cells: a stride of 0
        written.put([0, 1, 2, 3], [4, 5])
        assert not written.expect([0, 1, 2, 3], 0, 6).is_view

    def test_windows_that_have_wrapped(self, backend: ml.Backend) -> None:
        written = Written(backend, SlidingWindowCache(4), sequences=2, capacity=100, max_batch=4)
        for at in range(40):
            written.put([0, 1], [at])
            written.expect([1, 0], max(0, at - 4), at + 1)

    @pytest.mark.parametrize(
        "config",
        [
            ml.CacheConfig(layout=ml.Layout.TOKEN_MAJOR),
            ml.CacheConfig(permuted_v=True),
            ml.CacheConfig(cache_padding=32),
        ],
        ids=["token-major", "permuted_v", "padded"],
    )
    def test_any_layout(self, backend: ml.Backend, config: ml.CacheConfig) -> None:
        written = Written(backend, CausalCache(), config=config)
        written.put([0, 1, 2], [0, 1, 2, 3, 4])
        assert written.expect([0, 1, 2], 1, 5).is_view
        written.expect([1, 0], 0, 5)

    @pytest.mark.parametrize(("dtype", "tolerance"), [(ml.DType.Q8_0, 0.03), (ml.DType.Q4_0, 0.4)])
    def test_quantized_storage(self, backend: ml.Backend, dtype: ml.DType, tolerance: float) -> None:
        written = Written(backend, CausalCache(), dtype=dtype, dim=32)
        written.put([0, 1, 2], [0, 1, 2, 3])
        written.expect([0, 1, 2], 1, 4, tolerance)
        written.expect([2, 0, 1], 0, 4, tolerance)

    def test_nothing_at_all(self, backend: ml.Backend) -> None:
        written = Written(backend, CausalCache())
        written.put([0], [0, 1])
        written.cache.remove(0, 0)
        assert DenseBatch(written.cache, [0, 1]).tokens == 0


class TestRefusals:
    def test_sequences_that_do_not_end_together(self, backend: ml.Backend) -> None:
        written = Written(backend, CausalCache())
        written.put([0, 1], [0, 1, 2])
        written.put([0], [3])
        with pytest.raises(InvalidRangeError, match="sequence 1"):
            DenseBatch(written.cache, [0, 1])

    def test_gaps_and_positions_that_are_gone(self, backend: ml.Backend) -> None:
        written = Written(backend, CausalCache())
        written.put([0], [0, 1, 4])
        with pytest.raises(InvalidRangeError, match="gaps"):
            DenseBatch(written.cache, [0])
        written.put([1], [2, 3])
        with pytest.raises(InvalidRangeError, match=r"\[1, 4\)"):
            DenseBatch(written.cache, [1], 1)

    def test_what_means_nothing(self, backend: ml.Backend) -> None:
        written = Written(backend, CausalCache())
        with pytest.raises(OrderError, match="init"):
            DenseBatch(CausalCache(), [0])
        with pytest.raises(InvalidRangeError, match="no sequences"):
            DenseBatch(written.cache, [])
        with pytest.raises(InvalidSequenceError, match="DenseBatch: sequence 3"):
            DenseBatch(written.cache, [3])
        written.put([0], [0])
        for read in (DenseBatch.read, DenseBatch.read_stored):
            with pytest.raises(OrderError, match="DenseBatch: layer 7"):
                read(DenseBatch(written.cache, [0]), written.ctx, 7)
        written.cache.start_forward(written.ctx, Batch([1], [0]))
        key, value = (written.ctx.zeros((1, HEADS, dim), ml.DType.F32) for dim in written.dims)
        written.cache.set_layer(0)
        written.cache.put(written.ctx, key, value)
        written.cache.start_forward(written.ctx, Batch([0], [1]))
        written.put([0], [2])
        for read in (DenseBatch.read, DenseBatch.read_stored):
            with pytest.raises(OrderError, match="DenseBatch: layer 1 lacks position 1"):
                read(DenseBatch(written.cache, [0], 1), written.ctx, 1)
            assert read(DenseBatch(written.cache, [0], 2), written.ctx, 1)[0].shape[2] == 1
            assert read(DenseBatch(written.cache, [0], unwritten=True), written.ctx, 1)[0].shape[2] == 3
        written.cache.mark_lost(0)
        with pytest.raises(SequenceLostError, match=r"remove\(0, 0\)"):
            DenseBatch(written.cache, [0])


@pytest.mark.parametrize("sequences", [[0, 1], [1, 0]])
@pytest.mark.parametrize("dtype", [ml.DType.F32, ml.DType.Q8_0])
def test_latents_are_read_once_and_their_extras_in_the_same_order(
    backend: ml.Backend, sequences: list[int], dtype: ml.DType
) -> None:
    cache, ctx = CausalCache(), backend.new_context()
    cache.init(backend, dtype, 2, 16, 16)
    cache.start_forward(ctx, Batch([*range(5)] * 2, [0] * 5 + [1] * 5))
    key = np.random.default_rng(0).standard_normal((10, 1, 32)).astype(np.float32)
    places = np.arange(30, dtype=np.int32).reshape(10, 3)
    cache.put(ctx, ctx.from_numpy(key), v_dim=8, extra={"places": ctx.from_numpy(places)})
    reading = DenseBatch(cache, sequences, 1)
    keys, values = (x.to_numpy() for x in reading.read(ctx, 0))
    by_row = key.reshape(2, 5, 32)[sequences, 1:]
    assert np.abs(keys[:, 0] - by_row).max() < (0.05 if dtype is ml.DType.Q8_0 else 1e-9)
    assert np.array_equal(values, keys[..., :8])
    extra = reading.read_extra(ctx, 0, "places")
    assert extra is not None
    assert np.array_equal(extra.to_numpy(), places.reshape(2, 5, 3)[sequences, 1:])
    assert reading.read_extra(ctx, 0, "others") is None
    assert reading.read_extra(ctx, 1, "places") is None
