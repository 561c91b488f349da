"""Drafts in the engine's passes: proposed before one, verified in it, taken back after it.

After Leviathan et al. (2023), and the token trees of SpecInfer (Miao et al., 2024). A pass evaluates the
last token and the drafted ones; all of its logits are sampled at once, each with the draw that plain decoding
would have there, and the draft is right as long as it says the same. What it got wrong is taken back with
``kvcache.caches.branches``::

    text  ... t | d1 d2 d3 d4        sampled: d1 d2 x            d1, d2 and x are the next tokens;
                                                                 d3 and d4 leave the cache

So the answers are those of plain decoding, whatever the draft: greedy ones, and sampled ones of the same
seed. (As in any batched pass, logits may differ in their last bits from those of a pass over one token.)

Of recurrent layers the model gives the state after each drafted token, and the sequence goes back to the one
behind the last that was accepted. Where it does not (``RecurrentCache.delivers``) the sequence returns to
where the pass began, of which a copy was kept, and the accepted tokens are evaluated again together with the
next one, in a pass without drafts.

With ``width`` > 1 several drafts of one text are branches of its sequence, verified in the same pass; the
best one is kept. They share what came before, and each has the tokens of its own draft.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvcache.caches import branches
from kvcache.runner.errors import RequestError
from kvcache.runner.options import EngineOptions, SpeculativeOptions
from kvcache.runner.request_state import RequestState
from kvcache.runner.requests import Finished, Token
from kvcache.runner.sampling import Chosen
from kvcache.runner.scheduler import Branch, Part, Request

__all__ = ["Speculation", "Verifier", "accept"]


@dataclass(slots=True)
class Speculation:
    """What drafts were worth: sums over the requests that had one.

    ``passes`` of a text, the tokens ``drafted`` for them in the branch that won, and how many of these
    were ``accepted``; ``repeated`` tokens had to be evaluated again, on recurrent layers whose model does not
    deliver their states.
    """

    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    repeated: int = 0

    @property
    def acceptance(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


class Verifier:
    """The drafts of an engine's requests, and the sequences behind the requests' own for their branches."""

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
        """Empty the branches that a pass which did not come to its end has left."""
        if self._forked:
            branches.drop(self._cache, range(self._sequences, self._cache.max_sequences))
            self._forked = False

    def part(self, request: Request, limit: int) -> Part:
        """The next tokens of an answer, with drafts of what follows where the request has any."""
        run, session = request.run, request.session
        count = len(run.tokens) - run.stored
        # None while accepted tokens are to be evaluated again.
        drafts = self._drafts(request, limit) if request.draft is not None and count == 1 else []
        if not drafts or session is None:
            return Part(request, count)
        if len(drafts) == 1:
            tried = [Branch(session.seq, drafts[0])]
            mark = None if self._keep_states(run.stored, tried) else branches.mark(self._cache, session.seq)
            return Part(request, 1, tried, mark)
        first = self._sequences + session.seq * len(self._spares)
        self._forked = True
        branches.fork(self._cache, session.seq, range(first, first + len(drafts)))
        tried = [Branch(first + i, draft) for i, draft in enumerate(drafts)]
        self._keep_states(run.stored, tried)
        return Part(request, 1, tried)

    def _keep_states(self, stored: int, tried: Sequence[Branch]) -> bool:
        """Have the pass keep the states behind the last token and each drafted one; whether it will."""
        wants = (range(stored + 1, stored + 1 + len(branch.draft)) for branch in tried)
        found = [branches.want_states(self._cache, b.seq, want) for b, want in zip(tried, wants, strict=True)]
        return all(found)

    @property
    def _spares(self) -> range:
        """One for each branch of a request."""
        return range(self._options.width if self._options is not None else 0)

    def _drafts(self, request: Request, limit: int) -> list[list[int]]:
        """Distinct drafts that are not empty."""
        run, options = request.run, self._options
        assert options is not None
        assert request.session is not None
        assert request.draft is not None
        room = min(limit - len(run.tokens), run.settings.max_new_tokens - run.generated - 1)
        count = min(options.tokens, room)
        if count < 1:
            return []
        proposed = request.draft(request.session.seq, run.tokens, count, options.width)[: options.width]
        found = dict.fromkeys(tuple(int(token) for token in draft[:count]) for draft in proposed)
        found.pop((), None)
        wrong = [token for draft in found for token in draft if not 0 <= token < self._vocabulary]
        if wrong:
            raise RequestError(
                f"draft: token {wrong[0]}; the model's ids are 0 to {self._vocabulary - 1}: does the draft "
                "have another vocabulary?"
            )
        return [list(draft) for draft in found]

    def settle(self, part: Part, winner: Branch, known: int, right: int) -> int:
        """Let the request's sequence hold ``right`` tokens, or where it can go back to; how many it holds.

        ``known`` of them were there before the drafts.
        """
        assert part.request.session is not None
        cache, seq = self._cache, part.request.session.seq
        stands = branches.resume_point(cache, winner.seq, right, part.mark)
        if winner.seq == seq:
            branches.rollback(cache, seq, stands, part.mark)
        else:
            others = [branch.seq for branch in part.branches]
            if stands <= known - part.count:  # the text itself stands there
                branches.drop(cache, others)
                stands = known - part.count
            else:
                branches.rollback(cache, winner.seq, stands)
                branches.keep(cache, winner.seq, seq, others)
        cache.rolled_back(seq)  # which is not news to the session: its tokens are those that are left
        self.speculation.drafted += len(winner.draft)
        self.speculation.accepted += right - known
        self.speculation.repeated += right - stands
        return stands


def accept(
    run: RequestState,
    chosen: Chosen,
    tried: Sequence[tuple[Branch, int]],
    eos: Sequence[int],
    limit: int,
    told: list[Token | Finished],
) -> Branch:
    """Go along the branches that say what was chosen; the one that went furthest. What happens is ``told``.

    ``tried``: branches with the first of their rows in ``chosen``, which is behind the last token; one row
    behind each token of the draft follows. ``run.stored`` is then what the cache is to hold: all but the last
    sampled token.
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
