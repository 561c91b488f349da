"""Sessions that share their prefixes: what is found, what it costs, what is kept, and what fails.

What a session sees is judged bit for bit against its own tokens (see :mod:`kvcache.testing.conversing`).
"""

from __future__ import annotations

from typing import ClassVar

import ml
from kvcache.testing.prefix_finding import PrefixFindingTests
from kvcache.testing.prefix_offload import PrefixTransitTests
from kvcache.testing.prefix_pressure import PrefixPressureTests
from kvcache.testing.prefix_sessions import PrefixSessionTests
from kvcache.testing.prefix_tiers import PrefixTierTests
from kvcache.testing.prefix_traces import prefix_failure
from ml import DType

__all__ = ["PrefixTests"]


class PrefixTests(
    PrefixFindingTests, PrefixTierTests, PrefixPressureTests, PrefixTransitTests, PrefixSessionTests
):
    prefix_traces: ClassVar[int] = 12
    """How many random traces are run."""

    def test_random_conversations(
        self, backend: ml.Backend, floats: list[DType], declared: ml.Features
    ) -> None:
        codecs = [DType.Q8_0, DType.Q4_0] if declared.has("matmul") else []
        for seed in range(self.prefix_traces):
            failure = prefix_failure(backend, seed, [*floats, *codecs])
            assert failure is None, failure
