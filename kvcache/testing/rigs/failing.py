"""Failing in each call to the backend in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

import ml
from kvcache.testing.rigs.protocol import InjectedError, Plan, only_protocol

Subject = TypeVar("Subject")

WAYS = ("before the call", "by an interrupt", "after the call")
every_way_to_fail = pytest.mark.parametrize("when", WAYS)


def every_failure(
    backend: ml.Backend,
    when: str,
    make: Callable[[ml.Backend, ml.Context], Subject],
    act: Callable[[Subject], object],
    check: Callable[[Subject], object],
    stride: int = 1,
) -> int:
    """For each backend call of ``act`` in turn: make a new subject, let that call fail, and ``check``. With a
    ``stride``, only every ``stride``-th call fails; the ways to fail start at different calls. At least one
    call fails, if there is any. Returns the number of failed calls.
    """
    error = KeyboardInterrupt if when == "by an interrupt" else InjectedError
    fail_at, failed = WAYS.index(when) % stride, 0
    while True:
        plan = Plan()
        limited = only_protocol(backend, plan)
        with limited.new_context() as ctx:
            subject = make(limited, ctx)
            plan.arm(fail_at, when == "after the call", error)
            try:
                act(subject)
            except error:
                plan.arm(None)
                check(subject)
                fail_at, failed = fail_at + stride, failed + 1
            else:
                calls = len(plan.calls)
                assert calls <= fail_at, "a failure of the backend was swallowed"
                plan.arm(None)
                if failed or not calls:
                    return failed
                fail_at = calls - 1
