"""The encoder cache: each sequence reads its own encoder output, whatever becomes of the others."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

import kvcache
import ml
from kvcache import Batch
from kvcache.testing import values
from kvcache.testing.failing import every_failure, every_way_to_fail
from kvcache.testing.harness import CacheCase, attends
from kvcache.testing.rig import TOLERANCE, outcome, reference_attention
from ml import DType

__all__ = ["EncoderRig", "EncoderTests", "encoder_trace"]

LAYERS = (0, 3)


@dataclass(frozen=True)
class Output:
    """What a sequence's encoder gave: rows numbered from ``first``, at the position of its token."""

    position: int
    first: int
    count: int

    def rows(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        ids = np.arange(self.first, self.first + self.count)
        return values.keys(ids, ids % 7, layer), values.values(ids, layer)


class EncoderRig:
    """An encoder cache beside a dict of what each sequence holds."""

    def __init__(
        self,
        backend: ml.Backend,
        ctx: ml.Context,
        dtype: DType = DType.F32,
        config: ml.CacheConfig | None = None,
        max_sequences: int = 4,
    ) -> None:
        self.ctx, self.dtype = ctx, dtype
        self.config = config or ml.CacheConfig()
        self.cache = kvcache.EncoderCache()
        self.cache.set_config(self.config)
        self.cache.init(backend, dtype, max_sequences, 16, 8)
        self.held: dict[int, Output] = {}
        self.next_row = 1
        self.pass_: tuple[list[int], list[int]] = ([], [])

    def start(self, positions: Sequence[int], sequences: Sequence[int], items: Sequence[int] = ()) -> None:
        """A pass; ``items`` are the batch indices that bring something to encode."""
        self.pass_ = list(positions), list(sequences)
        multimodal = [(index, "an image") for index in items]
        self.cache.start_forward(self.ctx, Batch(*self.pass_, multimodal=multimodal))
        indices = items or range(len(positions))
        self.receivers: dict[int, int] = {}
        for index in indices:
            if items or sequences[index] not in self.receivers:
                self.receivers[sequences[index]] = positions[index]

    def put(self, *lengths: int, equal: bool = False, layers: Sequence[int] = LAYERS) -> None:
        """Store outputs of these lengths for the receivers, in their order."""
        for (seq, position), count in zip(self.receivers.items(), lengths, strict=True):
            self.held[seq] = Output(position, self.next_row, count)
            self.next_row += count
        for layer in layers:
            parts = [self.held[seq].rows(layer) for seq in self.receivers]
            key, value = (np.concatenate([part[i] for part in parts]) for i in range(2))
            self.cache.set_layer(layer)
            tensors = self.ctx.from_numpy(key), self.ctx.from_numpy(value)
            self.cache.put(self.ctx, *tensors, lengths=None if equal else lengths)

    def check(self, computes: bool = True) -> None:
        """Every token of the pass sees its own sequence's rows and no other, in every layer."""
        positions, sequences = self.pass_
        for layer in LAYERS:
            self.cache.set_layer(layer)
            key, value, mask = self.cache.get(self.ctx)
            stored_key, stored_value = key.to_numpy().astype(np.float32), value.to_numpy().astype(np.float32)
            if self.config.permuted_v:
                stored_value = stored_value.transpose(2, 0, 1)
            seen = self.seen(mask, len(positions), len(stored_key))
            for row, seq in zip(seen, sequences, strict=True):
                wanted_key, wanted_value = self.held[seq].rows(layer)
                np.testing.assert_array_equal(stored_key[row], wanted_key)
                np.testing.assert_array_equal(stored_value[row], wanted_value)
            if computes:
                self.check_attend(layer)
        for seq in range(4):
            if seq < self.cache._max_sequences:
                assert self.cache.encoder_cached(seq) == (seq in self.held)

    def seen(self, mask: kvcache.Mask, tokens: int, history: int) -> np.ndarray:
        if mask is None:
            assert len(set(self.pass_[1])) == 1, "only one sequence needs no mask"
            return np.ones((tokens, history), dtype=bool)
        assert isinstance(mask, ml.Tensor)
        padding = self.config.mask_batch_padding
        assert mask.shape == (-(-tokens // padding) * padding, history)
        assert mask.dtype is self.config.mask_dtype
        host = mask.to_numpy().astype(np.float32)
        assert ((host == 0) | (host == -np.inf)).all()
        assert (host[tokens:] == -np.inf).all(), "rows of padding see nothing"
        return np.asarray(host[:tokens] == 0)

    def check_attend(self, layer: int) -> None:
        sequences = self.pass_[1]
        query = values.queries(len(sequences), len(sequences))
        out = self.cache.attend(self.ctx, self.ctx.from_numpy(query, self.dtype), 0.5)
        limit = TOLERANCE[self.dtype]
        for found, asked, seq in zip(out.to_numpy().astype(np.float64), query, sequences, strict=True):
            wanted = reference_attention(asked, *self.held[seq].rows(layer), 0.5)
            np.testing.assert_allclose(found[:, 3:], wanted[:, 3:], rtol=limit, atol=limit)

    def copy_prefix(self, src: int, dst: int, length: int) -> None:
        self.cache.copy_prefix(src, dst, length)
        output = self.held.get(src)
        self.held.pop(dst, None)
        if output is not None and output.position < length:
            self.held[dst] = output

    def remove(self, seq: int, begin: int, end: int | None = None) -> None:
        self.cache.remove(seq, begin, end)
        output = self.held.get(seq)
        if output is None or output.position < begin:
            return
        if end is None or output.position < end:
            del self.held[seq]
        else:
            self.held[seq] = Output(output.position - end + begin, output.first, output.count)

    def look(self, computes: bool = True, read_only: bool = False) -> None:
        """A pass of all that hold something, read back."""
        holders = sorted(self.held, reverse=True)
        if holders:
            self.pass_ = [9] * len(holders), holders
            self.cache.start_forward(self.ctx, Batch(*self.pass_), read_only=read_only)
            self.check(computes)


def encoder_trace(backend: ml.Backend, seed: int, floats: Sequence[DType], computes: bool) -> None:
    """The trace of one seed; raises where the cache and the dict part."""
    rnd = random.Random(seed)
    config = ml.CacheConfig(
        mask_batch_padding=rnd.choice((1, 3)),
        mask_dtype=rnd.choice(list(floats)),
        permuted_v=rnd.random() < 0.3,
    )
    with backend.new_context() as ctx:
        count = rnd.randint(1, 4)
        r = EncoderRig(backend, ctx, rnd.choice(list(floats)), config, count)
        for _ in range(rnd.randint(3, 12)):
            seq, roll = rnd.randrange(count), rnd.random()
            if roll < 0.4:
                pairs = [(rnd.randrange(8), s) for s in rnd.choices(range(count), k=rnd.randint(1, 4))]
                pairs = rnd.sample(list(dict.fromkeys(pairs)), len(set(pairs)))
                items = sorted(rnd.sample(range(len(pairs)), rnd.randint(0, len(pairs))))
                before = dict(r.held)
                r.start([p for p, _ in pairs], [s for _, s in pairs], items)
                r.put(*(rnd.randint(1, 5) for _ in r.receivers))
                if all(s in r.held for _, s in pairs):
                    r.check(computes)
                if rnd.random() < 0.2:
                    r.cache.undo_forward()
                    r.held = before
            elif roll < 0.6 and count > 1:
                src, dst = rnd.sample(range(count), 2)
                r.copy_prefix(src, dst, rnd.randrange(9))
            elif roll < 0.8:
                begin = rnd.randrange(8)
                r.remove(seq, begin, rnd.choice((None, begin + rnd.randrange(4))))
            else:
                r.look(computes, read_only=rnd.random() < 0.5)
        r.look(computes)


class EncoderTests(CacheCase):
    encoder_traces: ClassVar[int] = 30
    """How many seeded traces of the encoder cache to run."""

    @pytest.fixture
    def encoders(self, backend: ml.Backend, ctx: ml.Context) -> Callable[..., EncoderRig]:
        """``encoders(dtype, config, max_sequences)``: an encoder cache and a dict, side by side."""
        return lambda *args, **named: EncoderRig(backend, ctx, *args, **named)

    def test_encoder_outputs_agree_with_a_dict_in_random_traces(
        self, backend: ml.Backend, floats: list[DType], declared: ml.Features
    ) -> None:
        for seed in range(self.encoder_traces):
            encoder_trace(backend, seed, floats, declared.has("matmul"))

    @pytest.mark.parametrize("permuted", [False, True], ids=["values by row", "permuted v"])
    def test_rows_see_their_own_sequences_part_only(
        self, encoders: Callable[..., EncoderRig], permuted: bool
    ) -> None:
        r = encoders(config=ml.CacheConfig(permuted_v=permuted, mask_batch_padding=4))
        r.start([0, 0, 1, 0, 1], [2, 0, 2, 1, 0])
        r.put(3, 1, 4)
        r.check(computes=False)
        _, _, mask = r.cache.get(r.ctx)
        assert isinstance(mask, ml.Tensor)
        drawn = ["".join(".x"[int(seen)] for seen in row) for row in mask.to_numpy() == 0]
        # Parts in the order of sequences: one row of 0, four of 1, three of 2; three rows of padding.
        expected = [".....xxx", "x.......", ".....xxx", ".xxxx...", "x......."] + 3 * ["........"]
        assert drawn == expected

    @attends
    def test_several_sequences_attend_to_their_own_output(self, encoders: Callable[..., EncoderRig]) -> None:
        r = encoders()
        r.start([0, 0, 1, 0], [2, 0, 2, 1])
        r.put(3, 1, 4)
        r.check()
        r.start([5], [1])
        r.check()

    def test_rows_are_divided_equally_where_no_lengths_are_given(
        self, encoders: Callable[..., EncoderRig]
    ) -> None:
        r = encoders()
        r.start([0, 0, 0], [1, 0, 3])
        r.put(2, 2, 2, equal=True)
        r.check(computes=False)
        key = r.ctx.zeros((4, values.KV_HEADS, values.KEY_DIM), DType.F32)
        with pytest.raises(kvcache.InvalidRangeError, match="lengths"):
            r.cache.put(r.ctx, key, key)
        r.check(computes=False)

    def test_items_name_the_sequences_that_receive(self, encoders: Callable[..., EncoderRig]) -> None:
        r = encoders()
        r.start([0, 0], [0, 1])
        r.put(2, 3)
        r.start([1, 4, 5, 1], [0, 1, 1, 2], items=[2, 3])
        r.put(4, 1)
        r.check(computes=False)
        assert r.held[0].position == 0
        assert r.held[1].position == 5
        with pytest.raises(kvcache.InvalidRangeError):
            r.cache.start_forward(r.ctx, Batch([0], [0], multimodal=[(1, None)]))
        r.check(computes=False)

    def test_a_later_output_for_one_leaves_what_another_shares(
        self, encoders: Callable[..., EncoderRig]
    ) -> None:
        r = encoders()
        r.start([0], [0])
        r.put(3)
        r.copy_prefix(0, 1, 1)
        r.copy_prefix(0, 2, 0)
        assert r.cache.nbytes == 2 * 3 * values.KV_HEADS * (values.KEY_DIM + values.VALUE_DIM) * 4
        r.start([4], [0])
        r.put(5)
        r.look(computes=False)
        assert r.cache.encoder_cached(1)
        assert not r.cache.encoder_cached(2)
        r.remove(0, 0)
        r.look(computes=False)

    @pytest.mark.parametrize(
        ("begin", "end", "left"),
        [(3, None, None), (2, 4, None), (4, None, 3), (0, 3, 0), (1, 2, 2), (0, 9, None)],
    )
    def test_an_output_goes_with_the_token_it_came_with(
        self, encoders: Callable[..., EncoderRig], begin: int, end: int | None, left: int | None
    ) -> None:
        r = encoders()
        r.start([3], [0])
        r.put(2)
        r.copy_prefix(0, 1, 4)
        r.remove(0, begin, end)
        assert (r.held[0].position if 0 in r.held else None) == left
        r.look(computes=False)
        if left is not None:
            r.remove(0, left)
            assert not r.cache.encoder_cached(0)
        assert r.cache.encoder_cached(1)
        assert r.cache.can_resume(0, 0)

    def test_reserving_stores_no_output(self, encoders: Callable[..., EncoderRig]) -> None:
        r = encoders()
        r.start([0], [0])
        r.put(2)
        held = dict(r.held)
        r.cache.start_forward(r.ctx, Batch([1, 0], [0, 1]), reserve=True)
        r.cache.set_layer(0)
        key = r.ctx.zeros((8, values.KV_HEADS, values.KEY_DIM), DType.F32)
        r.cache.put(r.ctx, key, key)
        assert r.cache.get(r.ctx)[0].shape[0] == 8
        r.held = held
        r.look(computes=False)
        assert not r.cache.encoder_cached(1)

    def test_outputs_of_a_wrong_shape_are_refused(self, encoders: Callable[..., EncoderRig]) -> None:
        r = encoders()
        r.start([0, 0], [0, 1])
        r.put(2, 3)

        def zeros(*shape: int) -> ml.Tensor:
            return r.ctx.zeros(shape, DType.F32)

        wrong: list[tuple[Any, ...]] = [
            (zeros(4, 8), zeros(4, 8)),
            (zeros(4, 2, 8), zeros(3, 2, 8)),
            (zeros(4, 2, 8), zeros(4, 1, 8)),
            (zeros(5, 2, 8), zeros(5, 2, 8), [2, 2]),
            (zeros(4, 2, 8), zeros(4, 2, 8), [4]),
            (zeros(4, 2, 8), zeros(4, 2, 8), [5, -1]),
            (zeros(4, 2, 8), zeros(4, 2, 8), [2, 2]),  # the layers before have 2 and 3
        ]
        r.cache.set_layer(5)
        for arguments in wrong:
            with pytest.raises(kvcache.InvalidRangeError):
                r.cache.put(r.ctx, *arguments)
        r.check(computes=False)

    def test_what_is_asked_out_of_order_is_refused(self, encoders: Callable[..., EncoderRig]) -> None:
        r = encoders()
        key = r.ctx.zeros((2, 2, 8), DType.F32)
        uses: list[Callable[[], object]] = [
            lambda: r.cache.get(r.ctx),
            lambda: r.cache.put(r.ctx, key, key),
            lambda: r.cache.attend(r.ctx, key, 1.0),
            r.cache.encoder_cached,
        ]
        for use in uses:
            assert isinstance(outcome(use), kvcache.OrderError)
        r.start([0, 0], [0, 1], items=[0])
        r.put(2)
        assert isinstance(outcome(uses[0]), kvcache.OrderError), "sequence 1 has no output"
        assert not r.cache.encoder_cached()
        r.remove(1, 0)
        assert isinstance(outcome(uses[1]), kvcache.OrderError), "a change of sequences ends the pass"
        assert isinstance(outcome(lambda: r.cache.copy_prefix(0, 0, 1)), kvcache.InvalidRangeError)
        assert isinstance(outcome(lambda: r.cache.copy_prefix(0, 1, -1)), kvcache.InvalidRangeError)
        assert isinstance(outcome(lambda: r.cache.remove(0, 3, 2)), kvcache.InvalidRangeError)
        assert isinstance(outcome(lambda: r.cache.encoder_cached(9)), kvcache.InvalidSequenceError)
        r.cache.close()
        for use in [*uses, lambda: r.cache.remove(0, 0), lambda: r.cache.can_resume(0, 0)]:
            assert isinstance(outcome(use), kvcache.ClosedError)
        r.cache.init(r.ctx.backend, DType.F32, 2, 8, 8)
        assert not r.cache.encoder_cached(0)

    def test_an_output_that_is_taken_back_was_never_there(self, encoders: Callable[..., EncoderRig]) -> None:
        r = encoders()
        r.start([0], [0])
        r.put(2)
        held = dict(r.held)
        r.start([1, 0], [0, 1])
        r.put(4, 4)
        r.cache.undo_forward()
        r.held = held
        r.look(computes=False)

    @pytest.mark.parametrize("dtype", [DType.Q8_0, DType.Q4_0], ids=lambda dtype: dtype.name)
    def test_block_formats_are_kept_as_halves(
        self, backend: ml.Backend, ctx: ml.Context, declared: ml.Features, dtype: DType
    ) -> None:
        if DType.F16 not in declared.dtypes:
            pytest.skip("declared absent: F16")
        cache = kvcache.EncoderCache()
        cache.init(backend, dtype, 1, 8, 8)
        cache.start_forward(ctx, Batch([0], [0]))
        zeros = ctx.zeros((2, 1, 5), DType.F32)
        cache.put(ctx, zeros, zeros)
        assert cache.get(ctx)[0].dtype is DType.F16

    @pytest.mark.parametrize("what", ["start", "put", "get", "copy", "remove"])
    @every_way_to_fail
    def test_a_failing_backend_leaves_encoder_outputs_as_they_were(
        self, backend: ml.Backend, what: str, when: str
    ) -> None:
        def make(limited: ml.Backend, ctx: ml.Context) -> EncoderRig:
            r = EncoderRig(limited, ctx)
            r.start([0, 0], [0, 1])
            r.put(2, 3)
            if what == "put":
                r.start([1], [1])
            return r

        tensors: dict[str, Callable[[EncoderRig], object]] = {
            "start": lambda r: r.cache.start_forward(r.ctx, Batch([1], [0])),
            "put": lambda r: r.cache.put(r.ctx, *_zeros(r.ctx)),
            "get": lambda r: r.cache.get(r.ctx),
            "copy": lambda r: r.cache.copy_prefix(0, 2, 1),
            "remove": lambda r: r.cache.remove(0, 0),
        }
        every_failure(backend, when, make, tensors[what], lambda r: r.look(computes=False), self.fault_stride)


def _zeros(ctx: ml.Context) -> tuple[ml.Tensor, ml.Tensor]:
    return ctx.zeros((4, 2, 8), DType.F32), ctx.zeros((4, 2, 5), DType.F32)
