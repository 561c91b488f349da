"""Speculative decoding: a draft proposes tokens, the model verifies all of them in one pass.

After Leviathan et al. (2023), and the token trees of SpecInfer (Miao et al., 2024). A pass evaluates the
last token and the drafted ones; each of its logits is sampled as plain decoding would, and the draft is
right as long as it says the same. What it got wrong is taken back with ``kvcache.caches.branches``::

    text  ... t | d1 d2 d3 d4        sampled: d1 d2 x            d1, d2 and x are the next tokens;
                                                                 d3 and d4 leave the cache

So the answers are those of plain decoding, whatever the draft: greedy ones, and sampled ones of the same
seed. (As in any batched pass, logits may differ in their last bits from those of a pass over one token.)

A recurrent state cannot go back by a few tokens. It returns to where the pass began, of which a copy was
kept, and the accepted tokens are evaluated again together with the next one, in a pass without drafts.

With ``width`` > 1 several drafts of one text are branches of its sequence, verified in the same pass; the
best one is kept. They share what came before, and each has the tokens of its own draft.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator as Events
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

import ml
from kvcache.cache import Batch, Cache
from kvcache.caches import branches
from kvcache.runner.drafts import Draft
from kvcache.runner.errors import RequestError
from kvcache.runner.generate import Generator, GeneratorOptions, LanguageModel, Prompt
from kvcache.runner.request_state import RequestState, Slot, has_token
from kvcache.runner.requests import Event, Finished, GenerationOptions
from kvcache.runner.tokenizer import Tokenizer

__all__ = ["Speculation", "SpeculativeGenerator", "SpeculativeOptions"]


@dataclass(frozen=True, slots=True)
class SpeculativeOptions(GeneratorOptions):
    """As GeneratorOptions, and: up to ``tokens`` drafted tokens a pass, in each of up to ``width`` branches.

    With more than one the cache has ``width`` sequences more for each of ``max_sequences``, and room for
    their drafts.
    """

    tokens: int = 4
    width: int = 1

    def __post_init__(self) -> None:
        GeneratorOptions.__post_init__(self)
        for name in ("tokens", "width"):
            if getattr(self, name) < 1:
                raise RequestError(f"SpeculativeOptions: {name}={getattr(self, name)}; it is >= 1")


@dataclass(slots=True)
class Speculation:
    """What drafts were worth in one ``generate``: sums over its requests.

    ``passes`` of a text, the tokens ``drafted`` for them in the branch that won, and how many of these
    were ``accepted``; ``repeated`` tokens had to be evaluated again, by recurrent layers alone.
    """

    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    repeated: int = 0

    @property
    def acceptance(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(slots=True)
class _Branch:
    """One draft, in a sequence of the cache."""

    seq: int
    draft: list[int]
    logits: Sequence[np.ndarray] = ()
    """Behind the last token of the text, and behind each of the draft."""


@dataclass(slots=True)
class _Attempt:
    """What one text has in a pass: its tokens that are not stored yet, and drafts of what follows."""

    slot: Slot
    run: RequestState
    tried: list[_Branch]
    mark: branches.Mark | None = None
    start: int = field(init=False)
    known: int = field(init=False)

    def __post_init__(self) -> None:
        self.start, self.known = self.run.stored, len(self.run.tokens)


class SpeculativeGenerator(Generator):
    """A Generator that verifies the tokens of ``draft``: the same answers in fewer passes.

    ``speculation`` counts what the drafts were worth. The draft is the caller's to close.
    """

    options: SpeculativeOptions

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer | None,
        draft: Draft,
        cache: Cache | None = None,
        options: SpeculativeOptions | None = None,
    ) -> None:
        super().__init__(model, tokenizer, cache, options or SpeculativeOptions())
        self.draft = draft
        self.speculation = Speculation()

    def _sizes(self) -> tuple[ml.DType, int, int]:
        options = self.options
        if options.width == 1:
            return options.cache_dtype, options.max_sequences, self.capacity
        # Cells are common to all: those of the texts, and of the drafts of all branches.
        drafts = options.width * (options.tokens + 1)
        return (
            options.cache_dtype,
            options.max_sequences * (1 + options.width),
            -(-(self.capacity + drafts) // (1 + options.width)),
        )

    def _largest_batch(self) -> int:
        options = self.options
        return max(options.prefill_chunk, options.max_sequences * options.width * (options.tokens + 1))

    def _spares(self, seq: int) -> range:
        """The sequences for branches of ``seq``."""
        width = self.options.width if self.options.width > 1 else 0
        first = self.options.max_sequences + seq * width
        return range(first, first + width)

    def generate(
        self, prompts: Sequence[Prompt], settings: GenerationOptions | None = None
    ) -> Events[Event, None, None]:
        events = super().generate(prompts, settings)
        self.speculation = Speculation()
        return events

    def _decode(self, running: Sequence[tuple[Slot, RequestState]]) -> Iterator[Event]:
        began = time.perf_counter()
        attempts = [self._attempt(slot, run) for slot, run in running]
        self._evaluate(attempts)
        events = [event for attempt in attempts for event in self._settle(attempt)]
        self.statistics.decode_seconds += time.perf_counter() - began
        yield from events

    # Before the pass.

    def _attempt(self, slot: Slot, run: RequestState) -> _Attempt:
        drafts = self._drafts(slot, run)
        if len(drafts) > 1:
            spares = self._spares(slot.seq)[: len(drafts)]
            branches.fork(self.cache, slot.seq, spares)
            return _Attempt(slot, run, [_Branch(*pair) for pair in zip(spares, drafts, strict=True)])
        mark = branches.mark(self.cache, slot.seq) if drafts else None
        return _Attempt(slot, run, [_Branch(slot.seq, drafts[0] if drafts else [])], mark)

    def _drafts(self, slot: Slot, run: RequestState) -> list[list[int]]:
        """Distinct drafts that are not empty; none while accepted tokens are to be evaluated again."""
        if len(run.tokens) - run.stored > 1:
            return []
        count = min(
            self.options.tokens,
            self.limit - len(run.tokens),
            run.settings.max_new_tokens - run.generated - 1,
        )
        if count < 1:
            return []
        width = self.options.width
        proposed = self.draft(slot.seq, run.tokens, count, width)
        found = dict.fromkeys(tuple(int(token) for token in draft[:count]) for draft in proposed[:width])
        found.pop((), None)
        wrong = [token for draft in found for token in draft if not 0 <= token < self._vocabulary]
        if wrong:
            raise RequestError(
                f"draft: token {wrong[0]}; the model's ids are 0 to {self._vocabulary - 1}: does the draft "
                "have another vocabulary?"
            )
        return [list(draft) for draft in found]

    @property
    def _vocabulary(self) -> int:
        return self.model.config.vocab_size

    # The pass, which is that of all texts and branches.

    def _evaluate(self, attempts: Sequence[_Attempt]) -> None:
        parts = [(attempt, branch) for attempt in attempts for branch in attempt.tried]
        batch = _batch(parts)
        with self.model.backend.new_context() as ctx:
            self.cache.start_forward(ctx, batch)
            rows = iter(self.model.forward(ctx, batch, self.cache).to_numpy())
        for _, branch in parts:
            branch.logits = list(itertools.islice(rows, len(branch.draft) + 1))

    # After the pass.

    def _settle(self, attempt: _Attempt) -> list[Event]:
        """Take in what is right, take the rest out of the cache."""
        slot, run = attempt.slot, attempt.run
        events, winner = self._accept_drafts(attempt)
        right = run.stored
        run.stored = self._bring_back(attempt, winner, right)
        counts = self.speculation
        counts.passes += 1
        counts.drafted += len(winner.draft)
        counts.accepted += right - attempt.known
        counts.repeated += right - run.stored
        if isinstance(events[-1], Finished):
            slot.leave()
        return events

    def _accept_drafts(self, attempt: _Attempt) -> tuple[list[Event], _Branch]:
        """Sample along the branches that say the same; what happened, and the one that went furthest.

        ``run.stored`` is then how many tokens the cache is to hold: all but the last sampled one.
        """
        run, alive = attempt.run, attempt.tried
        events: list[Event] = []
        for i in itertools.count():
            lead = alive[0]
            token = run.sampler(lead.logits[i])
            run.stored = attempt.known + i
            known = run.advance(token, self.model.config.eos_ids, self.limit)
            self.statistics.generated_tokens += has_token(known[0])
            self.statistics.decoded_tokens += 1
            events += known
            alive = [branch for branch in alive if branch.draft[i : i + 1] == [token]]
            if not alive or isinstance(known[-1], Finished):
                return events, lead
        raise AssertionError("unreachable")

    def _bring_back(self, attempt: _Attempt, winner: _Branch, right: int) -> int:
        """Let the text's sequence hold ``right`` tokens, or where it can go back to; how many it holds."""
        cache, seq = self.cache, attempt.slot.seq
        stands = branches.resume_point(cache, winner.seq, right, attempt.mark)
        if winner.seq == seq:
            branches.rollback(cache, seq, stands, attempt.mark)
            return stands
        others = [branch.seq for branch in attempt.tried]
        if stands <= attempt.start:  # the text itself stands there
            branches.drop(cache, others)
            return attempt.start
        branches.rollback(cache, winner.seq, stands)
        branches.keep(cache, winner.seq, seq, others)
        return stands


def _batch(parts: Sequence[tuple[_Attempt, _Branch]]) -> Batch:
    """What is not stored of each text, with the draft of each branch; logits from its last token on."""
    positions: list[int] = []
    sequences: list[int] = []
    inputs: list[int] = []
    outputs: list[int] = []
    for attempt, branch in parts:
        end = attempt.known + len(branch.draft)
        positions += range(attempt.start, end)
        sequences += [branch.seq] * (end - attempt.start)
        inputs += [*attempt.run.tokens[attempt.start :], *branch.draft]
        outputs += range(len(positions) - len(branch.draft) - 1, len(positions))
    return Batch(positions, sequences, inputs=inputs, outputs=outputs)
