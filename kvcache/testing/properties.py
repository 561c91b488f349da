"""Random sequences of calls against the specification: a plain dict of (sequence, position) -> token."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

import ml
from kvcache.testing.harness import CacheCase
from kvcache.testing.protocol import only_protocol
from kvcache.testing.stateful import machine_on
from kvcache.testing.traces import run_traces
from ml import DType

__all__ = ["PropertyTests"]

PARTS = 8


class PropertyTests(CacheCase):
    traces: ClassVar[int] = 100
    """How many seeded traces to run."""
    examples: ClassVar[int] = 15
    """How many programs hypothesis makes up."""

    @pytest.mark.parametrize("part", range(PARTS))
    def test_random_traces_agree_with_the_model(
        self, backend: ml.Backend, declared: ml.Features, floats: list[DType], part: int
    ) -> None:
        seeds = range(part, self.traces, PARTS)
        failures = run_traces(backend, seeds, floats, declared.has("matmul"))
        assert not failures, "\n\n".join(str(failure) for failure in failures[:3])

    def test_random_traces_need_the_required_protocol_only(
        self, backend: ml.Backend, declared: ml.Features, floats: list[DType]
    ) -> None:
        limited = only_protocol(backend)
        seeds = range(1_000_000, 1_000_000 + self.traces // 20)
        failures = run_traces(limited, seeds, floats, declared.has("matmul"))
        assert not failures, "\n\n".join(str(failure) for failure in failures[:3])

    def test_programs_of_hypothesis_agree_with_the_model(
        self, backend: ml.Backend, declared: ml.Features, floats: list[DType]
    ) -> None:
        run_state_machine_as_test(
            machine_on(backend, floats, declared.has("matmul")),
            settings=settings(
                max_examples=self.examples,
                stateful_step_count=15,
                derandomize=True,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
