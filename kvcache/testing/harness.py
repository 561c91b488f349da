"""Shared by the whole cache suite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest

import ml
from kvcache.testing.models.attention import Setup
from kvcache.testing.rigs.attention import Rig
from ml import DType, Layout
from ml.testing.harness import BackendCase, needs

MakeRig = Callable[..., Rig]

attends = needs("scale", "matmul", "softmax", "add", "compare", "where")
"""Mark a test that computes attention."""
computes = needs("add", "mul", "sin", "cos")
"""Mark a test that rotates keys."""

KINDS = {
    "causal": Setup(),
    "window": Setup(window=3),
    "window with memory": Setup(window=3, memory=6),
    "window with the first kept": Setup(window=3, keep=2),
    "chunked": Setup(chunk=4),
    "latent with extras": Setup(latent=True, extra=True),
}
"""One cache of each kind."""

ARRANGEMENTS = {
    "head major": ml.CacheConfig(),
    "token major": ml.CacheConfig(layout=Layout.TOKEN_MAJOR),
    "permuted v": ml.CacheConfig(permuted_v=True),
    "token major, permuted v": ml.CacheConfig(layout=Layout.TOKEN_MAJOR, permuted_v=True),
    "padded": ml.CacheConfig(cache_padding=4, mask_batch_padding=3),
    "padded by an odd number": ml.CacheConfig(cache_padding=7, mask_batch_padding=2, permuted_v=True),
    "elided": ml.CacheConfig(elide_mask=True),
    "elided and padded": ml.CacheConfig(elide_mask=True, cache_padding=4),
    "in many parts": ml.CacheConfig(call_bytes=1),
    "of fixed shapes": ml.CacheConfig(fixed_context=4, mask_batch_padding=2),
}
"""The layouts that a backend may request."""

every_kind = pytest.mark.parametrize("kind", list(KINDS.values()), ids=list(KINDS))
every_arrangement = pytest.mark.parametrize("arranged", list(ARRANGEMENTS.values()), ids=list(ARRANGEMENTS))


class CacheCase(BackendCase):
    """Fixtures of the cache suite; the backend is chosen as in ``ml.testing.BackendTests``."""

    fault_stride: ClassVar[int] = 1
    """Every how many calls to the backend one is made to fail (see failing.py)."""

    @pytest.fixture
    def rig(self, backend: ml.Backend, ctx: ml.Context) -> MakeRig:
        """``rig(setup=Setup(), **changes)``: a cache and its model."""

        def make(setup: Setup | None = None, **changes: Any) -> Rig:
            return Rig(replace(setup or Setup(), **changes), backend, ctx)

        return make

    @pytest.fixture
    def floats(self, declared: ml.Features) -> list[DType]:
        """The float dtypes that the backend stores."""
        return [dtype for dtype in (DType.F32, DType.F16, DType.BF16) if dtype in declared.dtypes]
