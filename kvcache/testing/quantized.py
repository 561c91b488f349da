"""Quantized storage: what is read back stays within the format's bound, whatever happens to the cells."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest

import kvcache
import ml
from kvcache import Batch
from kvcache.testing.harness import CacheCase
from kvcache.testing.rig import mask_of, reference_attention
from ml import DType, Layout

__all__ = ["QuantizedRig", "QuantizedTests", "bound", "quantized_trace"]

HEADS, KEY_DIM, VALUE_DIM = 2, 64, 32
CODECS = (DType.Q8_0, DType.Q4_0)
ROUNDING = {DType.F32: 0.0, DType.F16: 2.0**-11, DType.BF16: 2.0**-8}
ARRANGEMENTS = {
    "head major": ml.CacheConfig(),
    "token major": ml.CacheConfig(layout=Layout.TOKEN_MAJOR),
    "permuted v": ml.CacheConfig(permuted_v=True, cache_padding=4),
}
CACHES: dict[str, Callable[..., kvcache.CausalCache]] = {
    "causal": kvcache.CausalCache,
    "window": lambda shift=None: kvcache.SlidingWindowCache(3, 6, shift),
    "chunked": lambda shift=None: kvcache.ChunkedCache(4, shift),
}
both_formats = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
every_cache = pytest.mark.parametrize("make", list(CACHES.values()), ids=list(CACHES))


def bound(x: np.ndarray, codec: DType) -> np.ndarray:
    """How far each value read back may lie from ``x`` (..., dim), by the format.

    Half a step of the block's scale, or a whole one for the value on the far side of Q4_0's lopsided
    range (-8 to 7); and the scale's rounding to F16, which moves a value by up to 2**-11 of the peak.
    """
    blocks = x.reshape(*x.shape[:-1], -1, 32).astype(np.float64)
    peak = np.abs(blocks).max(axis=-1, keepdims=True)
    step = peak / 127 * 0.5 if codec is DType.Q8_0 else peak / 8
    limit = step * (1 + 1e-5) + peak * 2.0**-11 + 127 * 2.0**-25
    return np.broadcast_to(limit, blocks.shape).reshape(x.shape)


def rows_of(ids: np.ndarray, dim: int) -> np.ndarray:
    """Float32 (tokens, HEADS, dim) that belong to these ids, of very different magnitudes."""
    found = [np.random.default_rng([int(i), dim]).normal(size=(HEADS, dim)) * 4.0 ** (i % 5 - 2) for i in ids]
    return np.array(found, dtype=np.float32)


@dataclass
class QuantizedRig:
    """A quantized cache beside lists of the ids that each sequence holds."""

    cache: kvcache.CausalCache
    ctx: ml.Context
    codec: DType
    activations: DType = DType.F32
    tokens: dict[tuple[int, int], int] = field(default_factory=dict)
    next_id: int = 1

    def forward(self, positions: list[int], sequences: list[int]) -> None:
        ids = np.arange(self.next_id, self.next_id + len(positions))
        self.next_id += len(positions)
        self.cache.start_forward(self.ctx, Batch(positions, sequences))
        self.tokens |= {(s, p): int(i) for s, p, i in zip(sequences, positions, ids, strict=True)}
        for layer in range(2):
            self.cache.set_layer(layer)
            key, value = rows_of(ids + 100 * layer, KEY_DIM), rows_of(ids + 100 * layer, VALUE_DIM)
            self.cache.put(self.ctx, self.tensor(key), self.tensor(value))
        self.check(positions, sequences)

    def tensor(self, host: np.ndarray) -> ml.Tensor:
        return self.ctx.from_numpy(host, self.activations)

    def rounded(self, host: np.ndarray) -> np.ndarray:
        return host.astype(self.activations.numpy).astype(np.float32)

    def check(self, positions: list[int], sequences: list[int]) -> None:
        """Every token of the pass sees its own sequence's tokens, each within the format's bound."""
        for layer in range(2):
            self.cache.set_layer(layer)
            key, value, mask = self.cache.get(self.ctx)
            assert key.dtype is value.dtype is self.activations
            seen = mask_of(mask, len(positions), key.shape[0], self.cache.config)
            host_key, host_value = key.to_numpy(), value.to_numpy()
            if self.cache.config.permuted_v:
                host_value = host_value.transpose(2, 0, 1)
            for row, position, seq in zip(seen, positions, sequences, strict=True):
                ids = [self.tokens[seq, p] for p in self.visible(seq, position)]
                self.same(host_key[row], ids, KEY_DIM, layer)
                self.same(host_value[row], ids, VALUE_DIM, layer)

    def visible(self, seq: int, position: int) -> list[int]:
        cache, lowest = self.cache, 0
        if isinstance(cache, kvcache.SlidingWindowCache):
            lowest = position - cache.window
        if isinstance(cache, kvcache.ChunkedCache):
            lowest = position - position % cache.chunk
        return [p for p in cache.positions(seq).tolist() if lowest <= p <= position]

    def same(self, stored: np.ndarray, ids: list[int], dim: int, layer: int) -> None:
        """Each id has one row near it, in whatever order."""
        assert len(stored) == len(ids)
        wanted = self.rounded(rows_of(np.array(ids) + 100 * layer, dim))
        found = stored.astype(np.float32)
        slack = bound(wanted, self.codec) + ROUNDING[self.activations] * 1.1 * np.abs(wanted).max()
        for expected, limit in zip(wanted, slack, strict=True):
            assert any((np.abs(row - expected) <= limit).all() for row in found), "no row within the bound"

    def codes(self, layer: int = 0) -> list[np.ndarray]:
        """Codes and scales of all cells, as stored."""
        held = self.cache._buffers[layer]
        found = held.read_stored(self.ctx, 0, self.cache.cells)
        return [tensor.to_numpy() for tensor in found]


def quantized_trace(backend: ml.Backend, seed: int, floats: Sequence[DType]) -> None:
    """The trace of one seed; raises where what is read back leaves the format's bound."""
    rnd = random.Random(seed)
    make, config = rnd.choice(list(CACHES.values())), rnd.choice(list(ARRANGEMENTS.values()))
    cache = make(shift=lambda ctx, layer, key, offsets: key)
    cache.set_config(config)
    codec, count = rnd.choice(CODECS), rnd.randint(1, 3)
    cache.init(backend, codec, count, rnd.choice((5, 9)), 4)
    with backend.new_context() as ctx:
        r = QuantizedRig(cache, ctx, codec, rnd.choice(list(floats)))
        for _ in range(rnd.randint(3, 10)):
            _random_call(rnd, r, count)


def _random_call(rnd: random.Random, r: QuantizedRig, count: int) -> None:
    seq, roll = rnd.randrange(count), rnd.random()
    length = r.cache.offset(seq)
    if roll < 0.6:
        last = [r.cache.offset(s) for s in range(count)]
        pairs = []
        for _ in range(rnd.randint(1, 4)):
            seq = rnd.randrange(count)
            pairs.append((last[seq], seq))
            last[seq] += 1
        held, before = r.cache.held(), dict(r.tokens)
        try:
            r.forward([p for p, _ in pairs], [s for _, s in pairs])
        except kvcache.CacheFullError:
            assert (r.cache.held(), r.tokens) == (held, before)
    elif roll < 0.75 and count > 1:
        dst = (seq + 1) % count
        r.cache.copy_prefix(seq, dst, rnd.randint(0, length))
        r.tokens |= {(dst, p): r.tokens[seq, p] for p in r.cache.positions(dst).tolist()}
    elif roll < 0.9:
        begin = rnd.randint(0, length)
        end = rnd.choice((length, begin + rnd.randint(0, 2)))
        row = {p: r.tokens[seq, p] for p in r.cache.positions(seq).tolist()}
        try:
            r.cache.remove(seq, begin, max(begin, end))
        except kvcache.NotSupportedError:
            return
        moved = {(seq, p - max(0, end - begin)): token for p, token in row.items() if p >= max(begin, end)}
        r.tokens |= moved
    else:
        r.cache.defrag()


class QuantizedTests(CacheCase):
    quantized_traces: ClassVar[int] = 8
    """How many seeded traces of quantized caches to run."""

    def test_quantized_tokens_stay_within_their_bound_in_random_traces(
        self, backend: ml.Backend, declared: ml.Features, floats: list[DType]
    ) -> None:
        if not declared.has("matmul"):
            pytest.skip("declared absent: compute")
        for seed in range(self.quantized_traces):
            quantized_trace(backend, seed, floats)

    @pytest.fixture
    def quantized(
        self, backend: ml.Backend, ctx: ml.Context, declared: ml.Features
    ) -> Callable[..., QuantizedRig]:
        """``quantized(codec, make, config, activations)``: a cache of three sequences of 16."""
        if not declared.has("matmul"):
            pytest.skip("declared absent: compute")

        def make_rig(
            codec: DType,
            make: Callable[..., kvcache.CausalCache] = kvcache.CausalCache,
            config: ml.CacheConfig | None = None,
            activations: DType = DType.F32,
        ) -> QuantizedRig:
            cache = make(shift=lambda ctx, layer, key, offsets: key)
            cache.set_config(config or ml.CacheConfig())
            cache.init(backend, codec, 3, 16, 8)
            return QuantizedRig(cache, ctx, codec, activations)

        return make_rig

    @both_formats
    @every_cache
    @pytest.mark.parametrize("config", list(ARRANGEMENTS.values()), ids=list(ARRANGEMENTS))
    def test_what_is_read_back_lies_within_the_bound_of_the_format(
        self,
        quantized: Callable[..., QuantizedRig],
        codec: DType,
        make: Callable[..., Any],
        config: ml.CacheConfig,
    ) -> None:
        r = quantized(codec, make, config)
        r.forward([0, 1, 2, 3, 0], [0, 0, 0, 0, 1])
        r.forward([4, 1, 2, 0], [0, 1, 1, 2])
        r.forward([5], [0])
        r.forward([6, 3], [0, 1])

    @both_formats
    @pytest.mark.parametrize("activations", [DType.F32, DType.F16, DType.BF16], ids=lambda dtype: dtype.name)
    def test_activations_of_every_float_are_stored_and_read_back_as_such(
        self, quantized: Callable[..., QuantizedRig], codec: DType, activations: DType, declared: ml.Features
    ) -> None:
        if activations not in declared.dtypes:
            pytest.skip(f"declared absent: {activations}")
        r = quantized(codec, activations=activations)
        r.forward([0, 1, 2, 0], [0, 0, 0, 1])
        r.forward([3], [0])

    @both_formats
    def test_scattered_and_gathered_cells_hold_what_was_put(
        self, quantized: Callable[..., QuantizedRig], codec: DType
    ) -> None:
        r = quantized(codec)
        for position in range(15):
            r.forward([position, position, position], [2, 0, 1])
        r.cache.remove(1, 0)
        r.forward([1, 0, 2], [1, 1, 1])
        r.cache.remove(0, 0)
        r.forward(list(range(12)), [0] * 12)
        r.forward([15], [2])

    @both_formats
    def test_defragmentation_moves_codes_and_scales_bit_by_bit(
        self, quantized: Callable[..., QuantizedRig], codec: DType
    ) -> None:
        r = quantized(codec)
        for position in range(4):
            r.forward([position, position], [1, 0])
        r.cache.remove(1, 2)
        r.forward([4, 5], [0, 0])
        before = r.codes()
        rows = {seq: r.cache._table.rows[seq].cells.copy() for seq in (0, 1)}
        r.cache.defrag()
        after = r.codes()
        for seq, cells in rows.items():
            for old, new in zip(before, after, strict=True):
                np.testing.assert_array_equal(new[r.cache._table.rows[seq].cells], old[cells])
        r.forward([6, 2], [0, 1])

    @both_formats
    def test_keys_move_down_and_values_stay_bit_by_bit(
        self, quantized: Callable[..., QuantizedRig], codec: DType
    ) -> None:
        r = quantized(codec)
        r.forward([0, 1, 2, 3, 4], [0] * 5)
        before = r.codes()
        r.cache.remove(0, 1, 3)
        after = r.codes()
        half = len(before) // 2
        for old, new in zip(before[half:], after[half:], strict=True):
            np.testing.assert_array_equal(old, new)
        r.tokens |= {(0, 1): r.tokens[0, 3], (0, 2): r.tokens[0, 4]}
        r.forward([3], [0])

    @both_formats
    def test_zeros_come_back_as_zeros_and_the_peak_of_a_block_nearly_exact(
        self, quantized: Callable[..., QuantizedRig], codec: DType
    ) -> None:
        r = quantized(codec)
        key = np.zeros((3, HEADS, KEY_DIM), np.float32)
        key[1, 0, 5], key[2, 1, 40] = -3.0, 0.125
        r.cache.start_forward(r.ctx, Batch([0, 1, 2], [0, 0, 0]))
        r.cache.put(r.ctx, r.tensor(key), r.tensor(key[:, :, :VALUE_DIM]))
        found = r.cache.get(r.ctx)[0].to_numpy()[:3]
        assert (found[0] == 0).all()
        np.testing.assert_allclose(found, key, rtol=2.0**-10, atol=0)

    @both_formats
    @every_cache
    def test_attention_over_quantized_storage_is_attention_over_what_is_read_back(
        self, quantized: Callable[..., QuantizedRig], codec: DType, make: Callable[..., Any]
    ) -> None:
        r = quantized(codec, make)
        r.forward([0, 1, 2, 0, 1], [0, 0, 0, 1, 1])
        r.cache.set_layer(1)
        query = np.random.default_rng(1).normal(size=(5, 4, KEY_DIM)).astype(np.float32) / 8
        key, value, mask = r.cache.get(r.ctx)
        seen = mask_of(mask, 5, key.shape[0], r.cache.config)
        out = r.cache.attend(r.ctx, r.tensor(query), 0.2).to_numpy()
        for i, row in enumerate(seen):
            wanted = reference_attention(query[i], key.to_numpy()[row], value.to_numpy()[row], 0.2)
            np.testing.assert_allclose(out[i], wanted, rtol=2e-5, atol=2e-5)

    def test_bytes_per_token_are_those_of_the_format(self, backend: ml.Backend, ctx: ml.Context) -> None:
        sizes = {}
        for dtype in (DType.F16, *CODECS):
            cache = kvcache.CausalCache()
            cache.init(backend, dtype, 2, 16, 8)
            cache.start_forward(ctx, Batch([0], [0]), reserve=True)
            zeros = ctx.zeros((1, HEADS, 128), DType.F32)
            cache.put(ctx, zeros, zeros)
            sizes[dtype] = cache.nbytes / cache.cells
        values = 2 * HEADS * 128
        assert sizes[DType.F16] == 2 * values
        assert sizes[DType.Q8_0] == values * 34 / 32 <= 0.54 * sizes[DType.F16]
        assert sizes[DType.Q4_0] == values * 18 / 32 <= 0.29 * sizes[DType.F16]

    @both_formats
    @every_cache
    @pytest.mark.parametrize("reserve", [False, True], ids=["put", "reserve"])
    @pytest.mark.parametrize(("key_dim", "value_dim"), [(48, 32), (32, 40), (16, 16)])
    def test_a_head_that_does_not_divide_into_blocks_is_refused_before_anything_is_allocated(
        self,
        backend: ml.Backend,
        ctx: ml.Context,
        codec: DType,
        make: Callable[..., Any],
        reserve: bool,
        key_dim: int,
        value_dim: int,
    ) -> None:
        cache = make()
        cache.init(backend, codec, 2, 16, 8)
        key, value = (ctx.zeros((1, HEADS, dim), DType.F32) for dim in (key_dim, value_dim))
        cache.start_forward(ctx, Batch([0], [0]), reserve=reserve)
        before = backend.memory().allocated
        with pytest.raises(kvcache.InvalidRangeError, match="32") as caught:
            cache.put(ctx, key, value)
        assert str(key_dim if key_dim % 32 else value_dim) in str(caught.value)
        assert cache.nbytes == 0
        assert backend.memory().allocated <= before

    @both_formats
    def test_a_backend_that_only_stores_refuses_to_quantise(
        self, backend: ml.Backend, ctx: ml.Context, declared: ml.Features, codec: DType
    ) -> None:
        if declared.has("matmul"):
            pytest.skip("this backend computes")
        cache = kvcache.CausalCache()
        cache.init(backend, codec, 1, 4, 4)
        cache.start_forward(ctx, Batch([0], [0]))
        zeros = ctx.zeros((1, HEADS, 32), DType.F32)
        with pytest.raises(ml.NotSupportedError):
            cache.put(ctx, zeros, zeros)
        assert cache.nbytes == 0
