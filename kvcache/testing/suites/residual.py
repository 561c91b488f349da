"""Residual windows: which tokens are read as they were put, and which as their codes say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest

import kvcache
import ml
from kvcache import Batch, ResidualWindow
from kvcache.testing.harness import CacheCase
from kvcache.testing.models.declared import skip_undeclared
from kvcache.testing.rigs.failing import every_failure, every_way_to_fail
from kvcache.testing.rigs.residual import DIM, KV_HEADS, V_DIM, ResidualRig
from ml import DType, Layout

WINDOWS = (
    ResidualWindow("Q4_0", 4, 2), ResidualWindow("Q8_0", 3), ResidualWindow(("F16", "Q4_0"), 0, 3),
    ResidualWindow("F8_E4M3", 1, 1),
)  # fmt: skip
CONFIGS = {
    "head major": ml.CacheConfig(),
    "in many parts": ml.CacheConfig(layout=Layout.TOKEN_MAJOR, call_bytes=1, elide_mask=True),
    "padded": ml.CacheConfig(permuted_v=True, cache_padding=4, mask_batch_padding=3, call_bytes=4096),
}
MakeRig = Callable[..., ResidualRig]
FAULTS: dict[str, Callable[[ResidualRig], object]] = {
    "a pass": lambda r: r.attempt([(r.end(0), 0), (r.end(1), 1), (r.end(1) + 1, 1), (r.end(2), 2)]),
    "a shift": lambda r: r.remove(1, 1, 2),
    "defrag": lambda r: r.cache.defrag(),
    "restore": lambda r: r.replace(2, 0),
}


class ResidualTests(CacheCase):
    residual_calls: ClassVar[int] = 25
    """How many calls a random trace has."""

    @pytest.fixture
    def residual(self, backend: ml.Backend, ctx: ml.Context, declared: ml.Features) -> MakeRig:
        """``residual(window, seed=0, ...)``: a cache and its model."""
        if not declared.has("matmul"):
            pytest.skip("declared absent: compute")

        def make(window: ResidualWindow, seed: int = 0, **changes: Any) -> ResidualRig:
            return ResidualRig(backend, ctx, window, seed, **changes)

        return make

    @pytest.mark.parametrize("config", list(CONFIGS.values()), ids=list(CONFIGS))
    @pytest.mark.parametrize("sliding", [None, 7], ids=["causal", "sliding"])
    def test_a_token_is_exact_in_its_pass_and_while_it_is_among_the_last_or_the_first(
        self, residual: MakeRig, config: ml.CacheConfig, sliding: int | None
    ) -> None:
        """Random traces: batches, forks, removals, shifts, moves, snapshots, passes that were taken back."""
        for seed, window in enumerate(WINDOWS):
            residual(window, seed, config=config, sliding=sliding).trace(self.residual_calls)

    @pytest.mark.parametrize("activations", [DType.F16, DType.BF16], ids=lambda dtype: dtype.name)
    def test_exact_tokens_have_the_dtype_of_the_activations(
        self, residual: MakeRig, activations: DType, floats: list[DType]
    ) -> None:
        if activations not in floats:
            pytest.skip(f"declared absent: {activations}")
        r = residual(ResidualWindow("Q8_0", 4, 1), activations=activations)
        r.trace(self.residual_calls)

    def test_a_decoding_sequence_keeps_its_last_and_its_first(self, residual: MakeRig) -> None:
        r = residual(ResidualWindow("Q4_0", 3, 2))
        r.extend(8)
        for _ in range(6):
            r.extend(1, 1)
        exact = [p for p, token in sorted(r.rows[0].items()) if token.exact]
        assert exact == [0, 1, 10, 11, 12, 13], "the last three before the pass, and its own"
        assert r.cache.storage.table.exact_slots(np.arange(r.cache.cells)) is not None

    def test_what_a_fork_still_holds_as_its_last_stays_exact_for_all(self, residual: MakeRig) -> None:
        r = residual(ResidualWindow("Q4_0", 2))
        r.extend(6)
        r.copy_prefix(0, 1, 4)
        for _ in range(3):
            r.extend(1)
        assert [p for p, token in sorted(r.rows[0].items()) if token.exact] == [2, 3, 6, 7, 8]
        r.extend(1, 1, 1)
        r.remove(1, 0)
        r.extend(1)
        assert [p for p, token in sorted(r.rows[0].items()) if token.exact] == [8, 9, 10]

    def test_of_a_batch_that_is_too_large_the_retained_and_the_latest_are_exact(
        self, residual: MakeRig
    ) -> None:
        """Sequences may retain 3 * 3 tokens; 4 more were said to come in a batch."""
        r = residual(ResidualWindow("Q4_0", 2, 1), max_batch=4)
        pairs = [(p, 0) for p in range(20)]
        new = r.start(pairs)
        assert new is not None
        for position, token in enumerate(new):
            token.exact = position == 0 or position >= 20 - 12
        r.put(new)
        r.check(pairs)
        r.extend(1)
        assert [p for p, token in sorted(r.rows[0].items()) if token.exact] == [0, 18, 19, 20]

    def test_a_pass_taken_back_after_it_was_put_leaves_nobody_the_data_of_another(
        self, residual: MakeRig
    ) -> None:
        r = residual(ResidualWindow("Q4_0", 2), sequences=2, max_batch=2)
        r.extend(2, 0)
        r.extend(0, 2)
        r.extend(1, 1)
        rows = [dict(row) for row in r.rows]
        new = r.start([(3, 0), (3, 1)])
        assert new is not None
        r.put(new)
        r.cache.undo_forward()
        r.rows = rows
        r.read([(2, 0), (2, 1)])  # whatever has no slot any more was not exact in the model either
        r.extend(1, 1)

    def test_a_pass_taken_back_that_would_have_evicted_leaves_all_as_exact_as_it_was(
        self, residual: MakeRig
    ) -> None:
        """It takes the very cells that it evicts, which lie scattered."""
        r = residual(ResidualWindow("Q4_0", 9), sequences=2, max_batch=2, sliding=3)
        for _ in range(8):
            r.undo([(r.end(0), 0), (r.end(0) + 1, 0)])
            r.read([(min(r.rows[seq]), seq) for seq in (0, 1) if r.rows[seq]])
            r.extend(1, 1)

    @pytest.mark.parametrize("call", FAULTS.values(), ids=FAULTS)
    @every_way_to_fail
    def test_a_failing_backend_leaves_all_as_exact_as_it_was_or_says_what_is_lost(
        self, residual: MakeRig, backend: ml.Backend, call: Callable[[ResidualRig], object], when: str
    ) -> None:
        oracle = backend.new_context()

        def make(limited: ml.Backend, ctx: ml.Context) -> ResidualRig:
            r = ResidualRig(
                limited, ctx, ResidualWindow(("F16", "Q8_0"), 2, 1), 0, capacity=12, oracle=oracle
            )
            r.extend(5)
            r.copy_prefix(0, 1, 3)
            r.extend(1, 2, 2)
            r.remove(0, 5)
            return r

        def check(r: ResidualRig) -> None:
            r.forget_lost()
            for seq in range(3):
                r.read([(r.end(seq) - 1, seq)])
            r.extend(1, 1, 1)

        every_failure(backend, when, make, call, check, self.fault_stride)

    def test_bytes_are_bounded_by_what_sequences_retain_and_a_batch(
        self, residual: MakeRig, backend: ml.Backend
    ) -> None:
        token = KV_HEADS * (DIM + V_DIM) * DType.F32.itemsize
        for capacity, sequences, slots in ((40, 3, 3 * 6 + 8), (4, 2, 8)):
            sizes = []
            for dtype in (ResidualWindow("Q4_0", 4, 2), "Q4_0"):
                cache = kvcache.CausalCache()
                cache.set_config(ml.CacheConfig())  # without the padding that a backend may ask for
                skip_undeclared(backend, dtype)
                cache.init(backend, dtype, sequences, capacity, 8)
                with backend.new_context() as ctx:
                    cache.start_forward(ctx, Batch([0], [0]), reserve=True)
                    cache.put(
                        ctx,
                        ctx.zeros((1, KV_HEADS, DIM), DType.F32),
                        ctx.zeros((1, KV_HEADS, V_DIM), DType.F32),
                    )
                sizes.append(cache.nbytes)
            assert sizes[0] - sizes[1] == slots * token

    def test_snapshots_hold_codes(self, residual: MakeRig) -> None:
        """Their bytes, and what comes back of one that has left the cache."""
        r = residual(ResidualWindow("Q8_0", 4, 1))
        r.extend(9)
        r.snapshot(0)
        (copy, _), size = r.copies[0], KV_HEADS * (DIM + V_DIM) * 34 // 32
        assert copy.nbytes == 9 * size
        r.restore(0, 1)  # its very cells, exact as they are
        r.read([(8, 1)])
        copy.detach()
        assert copy.nbytes == 9 * size
        r.restore(0, 2)
        r.read([(8, 2), (8, 0)])
        r.extend(1, 0, 1)

    def test_codes_that_come_into_cells_of_exact_tokens_are_read_as_codes(self, residual: MakeRig) -> None:
        r = residual(ResidualWindow("Q4_0", 4))
        r.extend(4, 4)
        r.snapshot(1)
        r.copies[0][0].detach()
        r.remove(0, 0)
        r.restore(0, 0)
        assert sorted(r.rows[0]) == [0, 1, 2, 3]
        r.read([(3, 0), (3, 1)])

    @pytest.mark.parametrize("held", [0, 6])
    def test_parts_that_are_put_are_read_as_what_they_say(self, residual: MakeRig, held: int) -> None:
        r = residual(ResidualWindow("Q4_0", 4))
        if held:
            r.extend(held)
        new = r.start([(held, 0), (0, 1)])
        assert new is not None
        for token in new:
            token.exact = False
        key, value = (r.ctx.from_numpy(np.stack([t.put[part] for t in new])) for part in (0, 1))
        parts = *r.format.key.encode(r.ctx, key), *r.format.value.encode(r.ctx, value)
        r.cache.put_stored(r.ctx, parts, DType.F32)
        r.check([(held, 0), (0, 1)])
        r.extend(1, 1)

    def test_a_window_stands_beside_codes_and_not_beside_fixed_shapes(
        self, residual: MakeRig, backend: ml.Backend
    ) -> None:
        skip_undeclared(backend, "Q4_0")
        for dtype in ("F16", DType.F32, ("F32", "F32"), ResidualWindow("Q4_0", 1)):
            with pytest.raises(ml.DTypeError, match="residual window needs quantized storage"):
                kvcache.CausalCache().init(backend, ResidualWindow(dtype), 1, 8, 8)  # type: ignore[arg-type]
        for sizes in ((0, 0), (-1, 4), (1.5, 0), (True, 0)):
            with pytest.raises(kvcache.InvalidRangeError, match="residual_length and sink_tokens"):
                kvcache.CausalCache().init(backend, ResidualWindow("Q4_0", *sizes), 1, 8, 8)
        fixed, cache = ml.CacheConfig(fixed_shapes=True), kvcache.CausalCache()
        cache.set_config(fixed)
        with pytest.raises(kvcache.NotSupportedError, match="store Q4_0 alone"):
            cache.init(backend, ResidualWindow("Q4_0"), 1, 8, 8)
        cache.set_config(ml.CacheConfig())
        cache.init(backend, ResidualWindow("Q4_0", 3, 1), 1, 8, 8)
        with pytest.raises(kvcache.NotSupportedError, match="fixed_shapes"):
            cache.set_config(fixed)
        assert "Q4_0 (the first 1 and the last 3 exact) on " in repr(cache)
        assert cache.settings() == {"kind": "CausalCache", "dtype": "Q4_0", "residual_window": [3, 1]}
