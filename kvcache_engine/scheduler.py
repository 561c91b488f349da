"""The requests of an engine, and which of their tokens each pass computes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

import kvcache
from kvcache import Lookup, Prefetch, PrefixCache, Retention, Session, common_length
from kvcache.cache import Batch
from kvcache_engine.consensus import Agreement
from kvcache_engine.drafts import Draft
from kvcache_engine.request_state import RequestState
from kvcache_engine.requests import Finished
from kvcache_engine.sampling import Proposed, Sampler

__all__ = [
    "Branch", "Failed", "Part", "PassInputs", "Request", "chunks", "inputs_of", "plan_sharing",
    "worth_waiting",
]  # fmt: skip

MIN_SHARED = 16
"""The fewest shared tokens for which a pass is cut short, on models whose states cannot be shared from the
middle of a pass.
"""


@dataclass(frozen=True, slots=True)
class Failed:
    """A request that ended without an answer."""

    request: int
    error: Exception


class Request:
    """The handle of a request: ``run`` is its state, ``session`` its sequence while it is running.

    ``draft`` proposes tokens, which are verified in the passes of the answer.
    """

    def __init__(
        self,
        run: RequestState,
        draft: Draft | None = None,
        whose: Mapping[str, Any] = MappingProxyType({}),
        ids: np.ndarray | None = None,
    ) -> None:
        self.run = run
        self.whose = whose
        """The keyword arguments of PrefixCache.begin: who may share it, and what computes it."""
        self.ids = np.array(run.tokens, dtype=np.int64) if ids is None else ids
        """The prompt's ids in the prefix cache, which differ between tenants."""
        self.draft = draft
        self.repeat = 0
        """The accepted draft tokens that are evaluated again with the next token."""
        self.session: Session | None = None
        self.retention: Retention | None = None
        self.session_id = ""
        self.next_use: float | None = None
        self.ahead: Prefetch | None = None
        """Reads from stores while the request waits."""
        self.lookup: Lookup | None = None
        """The result of the search for its prefix when it first got a sequence."""
        self.started = False
        self.done = False
        """Whether it finished, failed or was cancelled."""
        self.error: Exception | None = None
        """The error with which it failed."""
        self.answer: Finished | None = None
        """The answer, unless it failed or was cancelled."""
        self.turn = 0
        """The number of its last pass, if each pass has one request."""
        self.stops: set[int] = set()
        """Positions of snapshots scheduled for other requests that continue from there."""

    @property
    def id(self) -> int:
        """The number of the request, as in the ``request`` of events."""
        return self.run.request

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt and the tokens generated so far."""
        return tuple(self.run.tokens)

    @property
    def text(self) -> str:
        """The text generated so far."""
        return self.run.text

    @property
    def fetching(self) -> bool:
        """Whether something is being read from stores for this request."""
        return self.ahead is not None and not self.ahead.done

    def release(self) -> None:
        """Release what was read for it."""
        ahead, self.ahead = self.ahead, None
        if ahead is not None:
            ahead.release()

    @property
    def prefilling(self) -> bool:
        """Whether more than the last token is still to be computed."""
        return not self.run.generated or len(self.run.tokens) - self.run.stored > 1 + self.repeat


@dataclass(frozen=True, slots=True)
class Branch:
    """One draft continuation, in a sequence of the cache.

    ``probabilities`` (draft, vocabulary): the distributions its tokens were drawn from; None if they were not
    sampled.
    """

    seq: int
    draft: list[int] = field(default_factory=list)
    probabilities: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """The next ``count`` tokens of a request, with draft continuations, if any, in ``branches``.

    ``mark``: a mark of the request's sequence, if its only branch is in that sequence itself. ``prefill``:
    whether the tokens are a prompt's, or computed again.
    """

    request: Request
    count: int
    branches: Sequence[Branch] = ()
    mark: kvcache.branches.Mark | None = None
    prefill: bool = False

    @property
    def size(self) -> int:
        """The tokens of the pass: each branch has those of the request, and its draft."""
        return self.count * max(1, len(self.branches)) + sum(len(branch.draft) for branch in self.branches)

    @property
    def tried(self) -> Sequence[Branch]:
        """The branches; if there are none, the request's sequence without a draft."""
        assert self.request.session is not None
        return self.branches or (Branch(self.request.session.seq),)


class PassInputs(NamedTuple):
    """What one pass computes, and how each of its outputs is drawn."""

    batch: Batch
    draws: list[tuple[Sampler, int]]
    """For each output, the sampler and the index of the draw that chooses its token."""
    logprobs: list[int | None]
    """For each output, for how many likely tokens log probabilities are requested."""
    proposed: list[Proposed]
    """The sampled draft tokens, each with the output that it guesses."""


def inputs_of(parts: Sequence[Part]) -> PassInputs:
    """One pass over ``parts``; those that reach the end of their tokens have an output there and after each
    draft token.
    """
    positions: list[int] = []
    sequences: list[int] = []
    inputs: list[int] = []
    outputs: list[int] = []
    made = PassInputs(Batch(positions, sequences, inputs=inputs, outputs=outputs), [], [], [])
    for part in parts:
        run = part.request.run
        begin, end = run.stored, run.stored + part.count
        own = run.tokens[begin:end]
        reached = end == len(run.tokens)
        for branch in part.tried:
            draft = branch.draft
            size = part.count + len(draft)
            positions += range(begin, begin + size)
            sequences += [branch.seq] * size
            inputs += own
            inputs += draft
            for i in range(len(draft) + 1 if reached else 0):
                if branch.probabilities is not None and i < len(draft):
                    made.proposed.append(Proposed(len(outputs), draft[i], branch.probabilities[i]))
                made.draws.append((run.sampler, run.generated + i))
                made.logprobs.append(run.settings.logprobs)
                outputs.append(len(positions) - len(draft) - 1 + i)
    return made


def chunks(requests: Iterable[Request], budget: int, prefix: PrefixCache) -> Iterator[Part]:
    """At most ``budget`` prompt tokens, first come first served, split where snapshots are due."""
    for request in requests:
        run, session = request.run, request.session
        assert session is not None
        cut, most = session.next_cut(run.stored), budget if session.reusable is None else 1
        stop = min(len(run.tokens), run.stored + most) if cut is None else cut
        due = prefix.next_snapshot(session.seq)
        count = (stop if due is None else min(stop, due)) - run.stored
        if count:
            yield Part(request, count, prefill=request.prefilling)
            budget -= count


def worth_waiting(
    request: Request, running: Iterable[Request], prefix: PrefixCache, ranks: Agreement
) -> bool:
    """Whether a prompt being computed will soon provide more of this request's prefix than exists now."""
    best = 0
    for other in running:
        shared = _shared(request, other)
        if other.run.stored < shared and (prefix.tree.divisible or shared in other.stops):
            best = max(best, shared)
    return best > 0 and best > ranks.least([prefix.longest(request.run.tokens, **request.whose)])[0]


def plan_sharing(request: Request, others: Iterable[Request], prefix: PrefixCache) -> None:
    """Schedule snapshots of a prompt where other requests diverge from it.

    Only needed if a model's state cannot be shared from the middle: a window or a recurrence.
    """
    session = request.session
    if prefix.tree.divisible or session is None or session.reusable is not None:
        return
    shared = {_shared(other, request) for other in others}
    new = {end for end in shared if end >= max(MIN_SHARED, request.run.stored + 1)} - request.stops
    if new:
        prefix.cache.schedule_snapshots(session.seq, sorted(new))
        request.stops |= new


def _shared(request: Request, other: Request) -> int:
    """How many first tokens two prompts share; the last token of a prompt is always computed."""
    return min(common_length(request.ids, other.ids), request.ids.size - 1)
