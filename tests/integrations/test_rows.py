"""The caches of a model's layers, for any runtime."""

from __future__ import annotations

import numpy as np

import ml
from kvcache import Batch
from kvcache.integrations.rows.caches import FULL, Kind, ModelCaches


def test_rows_that_cannot_be_moved_together_keep_no_others_from_it() -> None:
    family, kind = ModelCaches([Kind(FULL)]), Kind(FULL)
    cache = family.caches[kind]
    with ml.open_backend("numpy") as backend, backend.new_context() as ctx:
        cache.init(backend, ml.DType.F32, max_sequences=2, capacity=100, max_batch=4)
        for seq in (0, 1):
            cache.start_forward(ctx, Batch([0, 1, 2, 3], [seq] * 4))
            x = ctx.from_numpy(np.zeros((4, 1, 1), np.float32))
            cache.put(ctx, x, x)
            cache.get(ctx)
            cache.evict(seq, [1])
        for _ in range(2):
            family.line_up([cache], [0], 1000)
            family.line_up([cache], [1], 1)
        assert [row.contiguous for row in cache.storage.table.rows] == [False, True]
