"""Random sequences of calls against the specification: a plain dict of (sequence, position) -> token."""

from __future__ import annotations

from typing import ClassVar

import pytest

import ml
from kvcache.testing.harness import CacheCase
from kvcache.testing.rigs.protocol import only_protocol
from kvcache.testing.traces import run_traces
from ml import DType

PARTS = 8
SHOWN = 3
"""A test stops after this many failing traces, since shrinking each takes many runs."""


class PropertyTests(CacheCase):
    traces: ClassVar[int] = 100
    """The number of seeded traces of the attention caches."""
    quantized_traces: ClassVar[int] = 8
    state_traces: ClassVar[int] = 24
    encoder_traces: ClassVar[int] = 24
    """The numbers of traces of the quantized, the recurrent and the encoder cache."""

    @pytest.mark.parametrize("part", range(PARTS))
    def test_random_traces_agree_with_the_model(
        self, backend: ml.Backend, declared: ml.Features, floats: list[DType], part: int
    ) -> None:
        seeds = range(part, self.traces, PARTS)
        failures = run_traces(backend, seeds, floats, declared.has("matmul"), most=SHOWN)
        assert not failures, "\n\n".join(str(failure) for failure in failures)

    def test_quantized_tokens_agree_with_the_model_in_random_traces(
        self, backend: ml.Backend, declared: ml.Features, floats: list[DType]
    ) -> None:
        if not declared.has("matmul"):
            pytest.skip("declared absent: compute")
        seeds = range(self.quantized_traces)
        failures = run_traces(backend, seeds, floats, cache="quantized", most=SHOWN)
        assert not failures, "\n\n".join(str(failure) for failure in failures)

    @pytest.mark.parametrize("cache", ["recurrent", "encoder"])
    def test_states_and_outputs_follow_their_tokens_in_random_traces(
        self, backend: ml.Backend, declared: ml.Features, floats: list[DType], cache: str
    ) -> None:
        count = self.state_traces if cache == "recurrent" else self.encoder_traces
        failures = run_traces(backend, range(count), floats, declared.has("matmul"), cache, SHOWN)
        assert not failures, "\n\n".join(str(failure) for failure in failures)

    def test_random_traces_need_the_required_protocol_only(
        self, backend: ml.Backend, declared: ml.Features, floats: list[DType]
    ) -> None:
        limited = only_protocol(backend)
        for cache, count in (("attention", 6), ("recurrent", 1), ("encoder", 1)):
            seeds = range(1_000_000, 1_000_000 + count)
            failures = run_traces(limited, seeds, floats, declared.has("matmul"), cache)
            assert not failures, "\n\n".join(str(failure) for failure in failures)
