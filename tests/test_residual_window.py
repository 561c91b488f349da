"""Residual windows: what is read, and how it is asked for; that it is right is shown by the shipped suite."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import ml
from kvcache import Batch, CausalCache, ResidualWindow
from kvcache.attention.residual import split_exact
from kvcache.caches import branches
from kvcache.storage.cell_table import CellTable
from kvcache.storage.exact_slots import ExactSlots
from kvcache.storage.relocation import copy_exact
from kvcache.testing.rigs.residual import ResidualRig


@pytest.mark.parametrize("call_bytes", [1, 1 << 19])
def test_a_pass_reads_every_cell_once_as_codes_or_exactly(backend: ml.Backend, call_bytes: int) -> None:
    """Of the sequences in it; sequences of other lengths as one call, and codes in whole runs."""
    config = ml.CacheConfig(layout=ml.Layout.TOKEN_MAJOR, call_bytes=call_bytes)
    r = ResidualRig(backend, backend.new_context(), ResidualWindow("Q8_0", 3, 1), 0, config=config)
    r.extend(12)
    r.copy_prefix(0, 1, 10)
    for counts in ((2, 1), (1, 1, 1), (1, 4), (1, 1)):
        r.extend(*counts)
        forward, table = r.cache.pass_under_way(), r.cache.storage.table
        assert forward is not None
        read: dict[bool, list[int]] = {True: [], False: []}
        for level in forward.levels(r.ctx, max(1, call_bytes // 1024)):
            for planned in level.calls:
                call = planned.call
                runs = [np.arange(call.length) + call.start + i * call.step for i in range(call.batch)]
                read[level.exact] += (np.concatenate(runs) if call.cells is None else call.cells).tolist()
        rows = [table.rows[seq] for seq, count in enumerate(counts) if count]
        held = np.unique(np.concatenate([row.cells for row in rows]))
        slots = table.exact_slots(held)
        assert slots is not None
        coded, exact = split_exact(forward.segments(1), table, 1)
        for found, wanted in ((coded, held[slots < 0]), (exact, slots[slots >= 0])):
            assert sorted(np.concatenate([segment.each() for segment in found])) == sorted(wanted)
        assert set(read[True]) == set(slots[slots >= 0].tolist())
        assert set(read[False]) & set(held.tolist()) == set(held[slots < 0].tolist())


def test_cells_held_for_what_is_to_come_have_no_slots() -> None:
    """As those of a page that is read straight into the cache."""
    exact = ExactSlots(cells=8, slots=4, last=2, first=0)
    table, cells = CellTable(8, 1, exact), np.arange(4)
    table.take_run(0, 0, 0, 4)
    exact.renew(exact.retained([]), cells, [])
    assert table.exact_slots(cells) is not None
    table.drop(0, 0, 4)
    pin = table.hold(cells)
    table.adopt(0, cells, cells)
    table.unpin(pin)
    assert table.exact_slots(cells) is None


def attended(
    cache: CausalCache, ctx: ml.Context, positions: Sequence[int], sequences: Sequence[int], x: np.ndarray
) -> np.ndarray:
    """What two layers that are given ``x`` attend to, of the second."""
    tensor = ctx.from_numpy(x)
    cache.start_forward(ctx, Batch(positions, sequences))
    for layer in range(2):
        cache.set_layer(layer)
        cache.put(ctx, tensor, tensor.neg(ctx) if layer else tensor)
    return cache.attend(ctx, tensor, 0.5).to_numpy()


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_after_drafts_of_the_last_pass_are_taken_back_what_is_unquantized_is_as_without_them(
    backend: ml.Backend, accepted: int
) -> None:
    x, found = np.random.default_rng(0).standard_normal((20, 1, 32)).astype(np.float32), []
    end, ctx = 10 + accepted, backend.new_context()
    for drafts in (4, accepted):
        cache = CausalCache()
        cache.init(backend, ResidualWindow("Q4_0", 3, 1), 1, 20, 8)
        for at in range(10):
            attended(cache, ctx, [at], [0], x[at : at + 1])
        if drafts:
            attended(cache, ctx, range(10, 10 + drafts), [0] * drafts, x[10 : 10 + drafts])
        branches.rollback(cache, 0, end)
        found.append(attended(cache, ctx, [end], [0], x[end : end + 1]))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("max_batch", [12, 3], ids=["slots for all", "slots for what is retained"])
def test_what_is_copied_to_another_cache_with_its_slots_goes_on_as_the_first(
    backend: ml.Backend, max_batch: int
) -> None:
    window, ctx, rng = ResidualWindow("Q4_0", 3, 1), backend.new_context(), np.random.default_rng(0)
    caches = first, second = CausalCache(), CausalCache()
    first.init(backend, window, 3, 16, 16)
    second.init(backend, window, 3, 32, max_batch)

    attended(
        first, ctx, [*range(8)] * 2, [0] * 8 + [2] * 8, rng.standard_normal((16, 1, 32)).astype(np.float32)
    )
    first.copy_prefix(2, 1, 8)
    for seq, other in ((0, 1), (1, 0), (2, 2)):
        snapshot = first.snapshot(seq)
        snapshot.detach()
        assert second.restore(other, snapshot)
    copy_exact(first.storage, second.storage, [(0, 1), (1, 0), (2, 2)])
    x = rng.standard_normal((3, 1, 32)).astype(np.float32)
    found = [
        attended(cache, ctx, [8] * 3, seqs, x)
        for cache, seqs in zip(caches, ([0, 1, 2], [1, 0, 2]), strict=True)
    ]
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)
