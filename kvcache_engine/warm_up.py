"""Compiling or loading kernels in advance, before anyone waits for an answer."""

from __future__ import annotations

import numpy as np

import ml

__all__ = ["warm_up"]


def warm_up(backend: ml.Backend) -> None:
    """Make the backend's attention kernels ready; on CPUs they are compiled once per machine, which is
    logged.

    Later processes load them in about a second. No effect if the backend has no such kernels.
    """
    if not isinstance(backend, ml.SupportsRaggedAttention):
        return
    segments, readers = np.array([[0, 0, 1, 0, 1]]), np.array([[0, 0, 1]])
    plan = ml.RaggedPlan(1, segments, readers, np.empty(0, np.int32))
    with backend.new_context() as ctx:
        one = ctx.zeros((1, 1, 32), ml.DType.F32)
        attended = backend.ragged_attention(ctx, one, one, one, plan, 1.0)
        if attended is not None:
            ctx.compute(attended)
