"""Memory for pages: whoever has it on loan has it alone, until it is given back."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvcache.prefix import tiers
from kvcache.prefix.tiers import Lender, Loan

from ...rigs.threads import at_once


@pytest.mark.parametrize("seed", range(20))
def test_what_is_on_loan_is_nobody_elses(seed: int) -> None:
    rnd, lender = random.Random(seed), Lender()
    out: list[tuple[Loan, np.ndarray, int]] = []
    for mark in range(200):
        if out and rnd.random() < 0.5:
            loan, memory, written = out.pop(rnd.randrange(len(out)))
            assert (memory == written % 251).all()
            loan.give_back()
            loan.give_back()
        else:
            nbytes = rnd.choice((0, 1, 100, 1000))
            loan = Loan(lender)
            memory = loan.memory(nbytes)
            assert (memory.shape, memory.dtype) == ((nbytes,), np.uint8)
            memory[:] = mark % 251
            out.append((loan, memory, mark))


def test_what_was_given_back_is_lent_again() -> None:
    lender = Lender()
    with pytest.raises(LookupError), (loan := Loan(lender)):
        first = loan.memory(100)
        raise LookupError
    assert loan.serialized is None
    assert np.shares_memory(Loan(lender).memory(60), first)
    assert not np.shares_memory(Loan(lender).memory(60), first), "it is on loan"


def test_a_loan_that_needs_other_memory_gives_back_what_it_had() -> None:
    lender = Lender()
    loan = Loan(lender)
    small, large = loan.memory(10), loan.memory(20)
    assert np.shares_memory(Loan(lender).memory(10), small)
    assert not np.shares_memory(small, large)


def test_no_more_is_kept_than_a_few_buffers_of_moderate_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "LARGEST", 100)
    lender = Lender()
    buffers = [np.empty(100, np.uint8) for _ in range(tiers.KEPT + 2)]
    for buffer in (*buffers, np.empty(101, np.uint8)):
        lender.put_back(buffer)
    kept = [lender.take(100) for _ in range(tiers.KEPT)]
    assert [any(buffer is one for one in kept) for buffer in buffers] == [False] * 2 + [True] * len(kept)


def test_loans_of_several_threads() -> None:
    lender, wrong = Lender(), []

    def run(mark: int) -> None:
        for _ in range(300):
            loan = Loan(lender)
            memory = loan.memory(5000)
            memory[:] = mark
            if not (memory == mark).all():
                wrong.append(mark)
            loan.give_back()

    at_once(run, range(4))
    assert not wrong
