"""The tests of branches and of speculation are themselves tested: every bug planted here makes one fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

import ml
from kvcache.caches import branches
from kvcache.caches.causal import CausalCache
from kvcache.caches.recurrent import RecurrentCache
from kvcache.runner import engine, verification
from kvcache.runner.loading import bundled_model, load_model
from kvcache.runner.requests import GenerationOptions
from kvcache.runner.verification import Verifier
from kvcache.storage import state_table
from kvcache.storage.state_table import StateTable

from .prefix.rigs.branching import BRANCHING, branch_trace
from .test_speculative import Oracle, plain, speculate

Patch = pytest.MonkeyPatch
MUTATIONS: dict[str, tuple[str, Callable[[Patch], None]]] = {}
SEEDS = 60


def bug(kind: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def plant(function: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTATIONS[function.__name__] = kind, function
        return function

    return plant


@bug("window")
def what_is_not_exact_is_done_all_the_same(patch: Patch) -> None:
    patch.setattr(branches, "_check_exact", lambda *args: None)


@bug("recurrent")
def a_recurrent_cache_that_goes_back_too_far(patch: Patch) -> None:
    patch.setattr(branches, "_check_exact", lambda *args: None)


@bug("causal")
def losers_that_stay(patch: Patch) -> None:
    original = branches.keep
    patch.setattr(branches, "keep", lambda cache, winner, seq, losers=(): original(cache, winner, seq))


@bug("causal")
def a_winner_that_stays_as_well(patch: Patch) -> None:
    original = branches._prepare

    def prepare(cache: Any, op: str, *arguments: int) -> Any:
        if op == "copy_prefix" and arguments[2] == branches._ALL:
            prepare.winner = arguments[0]  # type: ignore[attr-defined]
        if op == "remove" and arguments == (getattr(prepare, "winner", None), 0):
            return lambda: None
        return original(cache, op, *arguments)

    patch.setattr(branches, "_prepare", prepare)


@bug("causal")
def a_fork_that_shares_one_token_too_many(patch: Patch) -> None:
    original = CausalCache.prepare_copy_prefix
    patch.setattr(
        CausalCache,
        "prepare_copy_prefix",
        lambda self, src, dst, length: original(self, src, dst, length + (length > 0)),
    )


@bug("causal")
def a_fork_that_is_half_done(patch: Patch) -> None:
    def fork(cache: Any, seq: int, into: Any, position: int | None = None) -> None:
        for branch in into:
            original(cache, seq, [branch], position)

    original = branches.fork
    patch.setattr(branches, "fork", fork)


@bug("recurrent")
def marks_that_are_checkpoints(patch: Patch) -> None:
    original = RecurrentCache.mark

    def mark(self: RecurrentCache, seq: int, op: str = "mark") -> Any:
        taken = original(self, seq, op)
        if taken.offset:
            self._states.keep(self._states.rows[seq], taken)
        return taken

    patch.setattr(RecurrentCache, "mark", mark)


@bug("recurrent")
def a_return_that_keeps_later_checkpoints(patch: Patch) -> None:
    original = RecurrentCache.prepare_return

    def prepare(self: RecurrentCache, seq: int, mark: Any) -> Callable[[], None]:
        points, commit = self._states.rows[seq].checkpoints, original(self, seq, mark)

        def keeping() -> None:
            commit()
            self._states.rows[seq].checkpoints = points

        return keeping

    patch.setattr(RecurrentCache, "prepare_return", prepare)


@bug("recurrent without checkpoints")
def a_return_to_an_empty_state(patch: Patch) -> None:
    original = state_table.StateRow
    patch.setattr(
        state_table, "StateRow", lambda *args, **named: replace(original(*args, **named), pending=None)
    )


@bug("recurrent")
def a_checkpoint_missed_after_a_return(patch: Patch) -> None:
    original = StateTable._is_due
    patch.setattr(StateTable, "_is_due", lambda self, row: row.slot is not None and bool(original(self, row)))


@bug("wrapper of sliding, full and recurrent")
def a_rollback_of_the_first_cache_only(patch: Patch) -> None:
    original = branches._return
    patch.setattr(branches, "_return", lambda part, to, i: (lambda: None) if i else original(part, to, i))


@bug("wrapper of sliding, full and recurrent")
def one_cache_speaks_for_all(patch: Patch) -> None:
    original = branches._reached
    patch.setattr(
        branches, "_reached", lambda part, seq, at, to, i: original(part, seq, at, to, i) if i else at
    )


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_trace_of_branches_notices(name: str, monkeypatch: Patch, numpy_backend: ml.Backend) -> None:
    kind, plant = MUTATIONS[name]
    assert kind in BRANCHING
    plant(monkeypatch)
    for seed in range(SEEDS):
        try:
            branch_trace(numpy_backend, seed, kind)
        except (AttributeError, TypeError, NameError):
            raise  # it does not fit the code that it is to break
        except Exception:
            return
    pytest.fail(f"{name}: {SEEDS} traces on {kind}, and none failed")


# Speculation.


@pytest.fixture(scope="module")
def tiny() -> Iterator[Any]:
    with ml.open_backend("numpy") as backend:
        yield load_model(bundled_model(), backend)


def _nothing_brought_back(patch: Patch) -> None:
    patch.setattr(Verifier, "settle", lambda self, part, winner, known, right: right)


def _one_token_too_many(patch: Patch) -> None:
    original = branches.rollback
    patch.setattr(
        branches,
        "rollback",
        lambda cache, seq, at, to=None: original(
            cache, seq, min(at + 1, branches.offset(cache, seq)) if at else at, None
        ),
    )


def _drafts_believed(patch: Patch) -> None:
    original = verification.accept

    def accept(run: Any, tried: Any, *rest: Any) -> Any:
        tried = [(branch, logits.copy()) for branch, logits in tried]
        for branch, logits in tried:
            for row, token in zip(logits, branch.draft, strict=False):
                row[token] = 1e9
        return original(run, tried, *rest)

    patch.setattr(engine, "accept", accept)


def _the_first_branch_wins(patch: Patch) -> None:
    original = verification.accept
    patch.setattr(engine, "accept", lambda run, tried, *rest: (original(run, tried, *rest), tried[0][0])[1])


@pytest.mark.parametrize(
    "plant", [_nothing_brought_back, _one_token_too_many, _drafts_believed, _the_first_branch_wins]
)
def test_speculation_that_is_wrong_is_noticed(tiny: Any, plant: Any, monkeypatch: Patch) -> None:
    prompts, settings = [[1, 40, 41, 42], [1, 50]], GenerationOptions(12, ignore_eos=True)
    expected = plain(tiny, prompts, settings)

    def same() -> bool:
        draft = Oracle(prompts, expected, tiny.config.vocab_size).partly
        found, _ = speculate(tiny, prompts, draft, settings, width=3, max_sequences=1)
        return found == expected

    assert same()
    plant(monkeypatch)
    try:
        noticed = not same()
    except Exception:
        noticed = True
    assert noticed
