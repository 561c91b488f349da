"""Speculative decoding in the engine: drafts are proposed before a pass, verified in it, and rolled back
after it.

After Leviathan et al. (2023), and the token trees of SpecInfer (Miao et al., 2024). A pass evaluates the last
token and the draft tokens. All of its logits are sampled at once, each with the draw that plain decoding
would use there, and draft tokens are accepted as long as they agree. Rejected tokens are rolled back with
``kvcache.caches.branches``::

    text  ... t | d1 d2 d3 d4        sampled: d1 d2 x            d1, d2 and x are the next tokens;
                                                                 d3 and d4 leave the cache

Whatever the draft, the answers are thus those of plain decoding: greedy ones, and sampled ones with the same
seed. (As in any batched pass, logits may differ in their last bits from those of a pass over one token.)

A draft that samples its tokens (``SamplingDraft``) has more of them accepted with rejection sampling
(``ml.nn.RejectionSampler``): a token is accepted with the probability that preserves the distribution, and
otherwise replaced. Answers then have the distribution of plain decoding, but differ from those of the same
seed.

For recurrent layers, the model delivers the state after each draft token, and the sequence goes back to the
state after the last accepted token. If the model does not (``RecurrentCache.delivers``), the sequence returns
to the beginning of the pass, of which a copy was kept, and the accepted tokens are evaluated again together
with the next token, in a pass without drafts.

With ``width`` > 1, several drafts of one text are branches of its sequence, verified in the same pass; the
best one is kept. They share the text before them, and each has the tokens of its own draft.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvcache import branches
from kvcache_engine.drafts import Proposal, SamplingDraft
from kvcache_engine.errors import RequestError
from kvcache_engine.options import EngineOptions, SpeculativeOptions
from kvcache_engine.request_state import RequestState
from kvcache_engine.requests import Finished, Token
from kvcache_engine.sampling import Chosen
from kvcache_engine.scheduler import Branch, Part, Request

__all__ = ["Speculation", "Verifier", "accept"]


_ROUNDING = 1e-3
"""How far the sum of a draft's probabilities may be from 1."""


@dataclass(slots=True)
class Speculation:
    """How well drafts worked: sums over the requests with a draft.

    ``passes`` of a text, how many of them had ``drafts``, the ``drafted`` tokens in the winning branches, and
    how many of these were ``accepted``. ``repeated`` tokens had to be evaluated again, for recurrent layers
    whose model does not deliver states.
    """

    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    repeated: int = 0
    drafts: int = 0

    @property
    def acceptance(self) -> float:
        """The fraction of draft tokens that were accepted; 0 if there were none."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """The tokens that a pass of a text produces: the accepted tokens and one more. 0 before the first
        pass.
        """
        return (self.passes + self.accepted) / self.passes if self.passes else 0.0


class Verifier:
    """The drafts of an engine's requests, and the additional sequences for their branches."""

    def __init__(self, cache: Any, options: EngineOptions, vocabulary: int) -> None:
        self._options = options if isinstance(options, SpeculativeOptions) else None
        self._sequences = options.max_sequences
        self._vocabulary = vocabulary
        self._cache = cache
        self._forked = False
        self.speculation = Speculation()

    @property
    def enabled(self) -> bool:
        return self._options is not None

    def clear(self) -> None:
        """Empty the branches that an unfinished pass has left."""
        if self._forked:
            branches.drop(self._cache, range(self._sequences, self._cache.max_sequences))
            self._forked = False

    def part(self, request: Request, limit: int) -> Part:
        """The next tokens of an answer, with draft continuations if the request has any."""
        run, session = request.run, request.session
        count = len(run.tokens) - run.stored
        # None while accepted tokens are to be evaluated again.
        drafts = self._drafts(request, limit) if request.draft is not None and count == 1 else []
        if not drafts or session is None:
            return Part(request, count)
        if len(drafts) == 1:
            tried = [replace(drafts[0], seq=session.seq)]
            mark = None if self._keep_states(run.stored, tried) else branches.mark(self._cache, session.seq)
            return Part(request, 1, tried, mark)
        first = self._sequences + session.seq * len(self._spares)
        self._forked = True
        branches.fork(self._cache, session.seq, range(first, first + len(drafts)))
        tried = [replace(draft, seq=first + i) for i, draft in enumerate(drafts)]
        self._keep_states(run.stored, tried)
        return Part(request, 1, tried)

    def _keep_states(self, stored: int, tried: Sequence[Branch]) -> bool:
        """Request the states after the last token and each draft token from the pass; returns whether it
        delivers them.
        """
        wants = (range(stored + 1, stored + 1 + len(branch.draft)) for branch in tried)
        delivers = [
            branches.want_states(self._cache, b.seq, want) for b, want in zip(tried, wants, strict=True)
        ]
        return all(delivers)

    @property
    def _spares(self) -> range:
        """The additional sequences, one for each branch of a request."""
        return range(self._options.width if self._options is not None else 0)

    def _drafts(self, request: Request, limit: int) -> list[Branch]:
        """Distinct, non-empty drafts, not yet assigned to sequences."""
        run, options = request.run, self._options
        assert options is not None
        assert request.session is not None
        assert request.draft is not None
        room = min(limit - len(run.tokens), run.settings.max_new_tokens - run.generated - 1)
        count = min(options.tokens, room)
        if count < 1:
            return []
        seq, draft = request.session.seq, request.draft
        if run.sampler.temperature and options.rejects and isinstance(draft, SamplingDraft):
            drawn = draft.sample(seq, run.tokens, count, run.sampler, run.generated)
            self._check_ids(drawn.tokens)
            _check_drawn(drawn, self._vocabulary)
            branch = Branch(seq, [int(token) for token in drawn.tokens[:count]], drawn.probabilities[:count])
            return [branch] if branch.draft else []
        proposed = draft(seq, run.tokens, count, options.width)[: options.width]
        distinct = dict.fromkeys(tuple(int(token) for token in tokens[:count]) for tokens in proposed)
        distinct.pop((), None)
        self._check_ids([token for tokens in distinct for token in tokens])
        return [Branch(seq, list(tokens)) for tokens in distinct]

    def _check_ids(self, tokens: Sequence[int]) -> None:
        wrong = [token for token in tokens if not 0 <= token < self._vocabulary]
        if wrong:
            raise RequestError(
                f"draft: token {wrong[0]}; the model's ids are 0 to {self._vocabulary - 1}: does the draft "
                "have another vocabulary?"
            )

    def settle(self, part: Part, winner: Branch, known: int, right: int) -> int:
        """Cut the request's sequence to ``right`` tokens, or to where it can go back to; returns its length.

        ``known`` of them were there before the drafts.
        """
        assert part.request.session is not None
        cache, seq = self._cache, part.request.session.seq
        stands = branches.resume_point(cache, winner.seq, right, part.mark)
        if winner.seq == seq:
            branches.rollback(cache, seq, stands, part.mark)
        else:
            others = [branch.seq for branch in part.branches]
            if stands <= known - part.count:  # the text itself is in that sequence
                branches.drop(cache, others)
                stands = known - part.count
            else:
                branches.rollback(cache, winner.seq, stands)
                branches.keep(cache, winner.seq, seq, others)
        cache.rolled_back(seq)  # the session is unaffected: the remaining tokens are its own
        self.speculation.drafts += 1
        self.speculation.drafted += len(winner.draft)
        self.speculation.accepted += right - known
        self.speculation.repeated += right - stands
        return stands


def _check_drawn(drawn: Proposal, vocabulary: int) -> None:
    probabilities, count = drawn.probabilities, len(drawn.tokens)
    if probabilities.shape != (count, vocabulary):
        raise RequestError(
            f"draft: {count} tokens with probabilities {probabilities.shape}; there must be one for each "
            f"token of the vocabulary: {(count, vocabulary)}"
        )
    sums, own = probabilities.sum(1), probabilities[np.arange(count), np.asarray(drawn.tokens, np.int64)]
    if count and not (np.abs(sums - 1).max() < _ROUNDING and probabilities.min() >= 0 and own.min() > 0):
        raise RequestError(
            "draft: probabilities must be at least 0, sum to 1, and be above 0 for the token that was drawn"
        )


def accept(
    run: RequestState,
    chosen: Chosen,
    tried: Sequence[tuple[Branch, int]],
    eos: Sequence[int],
    limit: int,
    told: list[Token | Finished],
) -> Branch:
    """Follow the branches that agree with the chosen tokens; returns the longest match. Events are ``told``.

    ``tried``: branches, each with its first row in ``chosen``, which is the row after the last token; one row
    after each draft token follows. ``run.stored`` is then the number of tokens that the cache should hold:
    all but the last sampled token.
    """
    known = run.stored
    for i in itertools.count():
        lead, row = tried[0]
        token = chosen.token(row + i)
        run.stored = known + i
        told += run.advance(token, eos, limit, chosen.logprobs(row + i))
        tried = [pair for pair in tried if pair[0].draft[i : i + 1] == [token]]
        if not tried or isinstance(told[-1], Finished):
            break
    return lead
