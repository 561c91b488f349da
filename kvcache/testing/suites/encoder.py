"""The encoder cache: each sequence reads its own encoder output, whatever happens to the others."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import kvcache
import ml
from kvcache import Batch
from kvcache.testing.harness import CacheCase, attends
from kvcache.testing.models import values
from kvcache.testing.models.declared import skip_undeclared
from kvcache.testing.rigs.encoder import EncoderRig, Output
from ml import DType


class EncoderTests(CacheCase):
    @pytest.fixture
    def encoders(self, backend: ml.Backend, ctx: ml.Context) -> Callable[..., EncoderRig]:
        """``encoders(dtype, config, max_sequences)``: an encoder cache and its model."""
        return lambda *args, **named: EncoderRig(backend, ctx, *args, **named)

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
        # Output in the order of sequences: one row of 0, four of 1, three of 2; three rows of padding.
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

    def test_an_output_is_held_once_by_sequences_and_snapshots_and_outlives_its_cache(
        self, encoders: Callable[..., EncoderRig], backend: ml.Backend
    ) -> None:
        r, other = encoders(), encoders(config=ml.CacheConfig(permuted_v=True))
        r.start([1], [0])
        r.put(3)
        nbytes = 3 * 2 * values.KV_HEADS * (values.KEY_DIM + values.VALUE_DIM) * 4
        assert r.cache.nbytes == nbytes
        snapshot = r.cache.snapshot(0)
        assert (snapshot.begin, snapshot.end, snapshot.position, snapshot.nbytes) == (0, 2, 1, nbytes)
        r.copy_prefix(0, 1, 2)
        assert r.cache.restore(2, snapshot)
        assert r.cache.nbytes == nbytes
        r.cache.close()
        r.cache.init(backend, DType.F32, 4, 16, 8)
        for rig in (r, other):
            assert rig.cache.restore(2, snapshot)
            rig.outputs = {2: Output(1, 1, 3)}
            rig.look(computes=False)

    @pytest.mark.parametrize("dtype", ["Q8_0", "F8_E4M3", "F32/Q4_0"])
    def test_formats_are_kept_as_halves(self, backend: ml.Backend, ctx: ml.Context, dtype: str) -> None:
        skip_undeclared(backend, DType.F16)
        cache = kvcache.EncoderCache()
        cache.init(backend, dtype, 1, 8, 8)
        cache.start_forward(ctx, Batch([0], [0]))
        zeros = ctx.zeros((2, 1, 5), DType.F32)
        cache.put(ctx, zeros, zeros)
        assert cache.get(ctx)[0].dtype is DType.F16
