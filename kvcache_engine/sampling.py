"""Choosing the next tokens: each request's sampling settings, and sampling for a whole pass on its device."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

import numpy as np

import ml
from kvcache_engine.errors import RequestError, RunnerError, check_whole
from ml import nn

__all__ = ["Choice", "Chosen", "Logprobs", "Proposed", "Sampler"]

_BLOCK = 64
"""How many draws are made in advance at a time."""
_LARGEST_VOCABULARY = 1 << 24
"""Ids up to here are exact in F32."""


class Sampler:
    """Greedy at ``temperature`` 0, otherwise samples from softmax(logits / temperature), possibly truncated.

    ``top_k`` keeps the k likeliest tokens (0: all). ``top_p`` then keeps the smallest set of the likeliest
    whose probability together reaches p, and never fewer than one (Holtzman et al., 2020). ``min_p`` then
    keeps the tokens whose probability is at least that fraction of the highest (0: all; Nguyen et al., 2024).
    Ties go to the lower token id. The same ``seed`` gives the same draws; None takes a new seed. Each
    ``stream`` of a seed has its own draws: with one stream per sequence, a text does not depend on the rest
    of the batch.

    Raises RequestError for a setting outside its range.

    >>> from kvcache_engine import Sampler
    >>> Sampler(temperature=0.8, top_p=0.95, seed=3).uniform(0) == Sampler(seed=3).uniform(0)
    True
    """

    def __init__(
        self,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stream: int | None = None,
        min_p: float = 0.0,
    ) -> None:
        if not (_is_real(temperature) and temperature >= 0):
            raise RequestError(
                f"Sampler: temperature={temperature!r}; it must be a number of at least 0 (0 is greedy)"
            )
        if not (_is_real(top_p) and 0 < top_p <= 1):
            raise RequestError(f"Sampler: top_p={top_p!r}; it must be a number in (0, 1]")
        if not (_is_real(min_p) and 0 <= min_p <= 1):
            raise RequestError(
                f"Sampler: min_p={min_p!r}; it must be a number in [0, 1] (0 keeps every token)"
            )
        self.top_k = check_whole("Sampler", "top_k", top_k, 0, " (0 keeps every token)")
        for name, value in (("seed", seed), ("stream", stream)):
            if value is not None:
                check_whole("Sampler", name, value, 0)
        self.temperature = temperature
        self.top_p, self.min_p = top_p, min_p
        self.seed = secrets.randbits(32) if seed is None else seed
        self._draws, self.drafting, self.accepting = (
            Uniforms(self.seed, stream or 0, *use) for use in ((), (1,), (2,))
        )
        """Separate draws decide the draft's token ``index``, and whether it is accepted."""

    def uniform(self, index: int) -> float:
        """Draw ``index`` of this seed and stream; the sampled token is the one at which the cumulative
        probability reaches it (``ml.nn.BatchSampler``).
        """
        return self._draws(index)

    def settings(self, uniform: float) -> tuple[float, int, float, float, float]:
        """One row of ``ml.nn.Draws``, column by column."""
        return self.temperature, min(self.top_k, _LARGEST_VOCABULARY), self.top_p, uniform, self.min_p


class Uniforms:
    """Draws in (0, 1], exact in F32, of a seed and a stream; they are indexed, so they can be taken in any
    order.
    """

    def __init__(self, seed: int, *stream: int) -> None:
        self._entropy = np.random.SeedSequence(seed, spawn_key=stream)
        self._block = -1
        self._draws: list[float] = []

    def __call__(self, index: int) -> float:
        block, place = divmod(index, _BLOCK)
        if block != self._block:
            key = self._entropy.generate_state(2, np.uint64)
            raw = np.random.Philox(key=key, counter=block * _BLOCK).random_raw(_BLOCK)
            self._draws = (((raw >> np.uint64(40)) + np.uint64(1)) * 2.0**-24).tolist()
            self._block = block
        return self._draws[place]


@dataclass(frozen=True, slots=True)
class Logprobs:
    """log softmax of the model's logits, before temperature and truncation.

    For the drawn token and for the likeliest ones, as (id, log probability) in descending order, ties by
    lower id. An impossible token has -inf.
    """

    token: float
    top: tuple[tuple[int, float], ...] = ()


class Chosen:
    """The tokens drawn in a pass, one for each row of its logits: (rows, 2), id and largest logit.

    ``logprobs`` are those of the rows that requested them.
    """

    def __init__(self, rows: np.ndarray, logprobs: Mapping[int, Logprobs] | None = None) -> None:
        self._rows: list[list[float]] = rows.tolist()
        self._logprobs = logprobs or {}

    def logprobs(self, row: int) -> Logprobs | None:
        """The log probabilities of a row; None if they were not requested."""
        return self._logprobs.get(row)

    def token(self, row: int) -> int:
        """The token of a row. Raises RunnerError if the logits contain NaN or infinity, or no token that may
        be drawn.
        """
        token, largest = self._rows[row]
        if not math.isfinite(largest):
            raise RunnerError(
                f"sampling: the largest logit is {largest}; the forward pass overflowed; try a wider dtype"
            )
        return int(token)


@dataclass(frozen=True, slots=True)
class Proposed:
    """A draft token for ``row`` of a pass, drawn from ``probabilities`` (vocabulary,) on the host."""

    row: int
    token: int
    probabilities: np.ndarray


class Choice:
    """How the tokens of one pass are drawn: for each row, the sampler and the index of its draw.

    A row with a ``proposed`` token gets that token or a replacement (``ml.nn.RejectionSampler``), with the
    same distribution. ``logprobs`` is the number of likeliest tokens for which each row requests log
    probabilities (0: only the drawn one; None: none; empty: none for any row).

    Create it before the pass is queued, since it uploads its data.
    """

    def __init__(
        self,
        ctx: ml.Context,
        draws: Sequence[tuple[Sampler, int]],
        vocabulary: int,
        logprobs: Sequence[int | None] = (),
        proposed: Sequence[Proposed] = (),
    ) -> None:
        self._count = len(draws)
        rows = [s.settings(s.uniform(i) if s.temperature else 1.0) for s, i in draws]
        self._draws = nn.Draws(*np.array(rows, np.float64).reshape(-1, 5).T)
        self._tried, self._drafted = [each.row for each in proposed], _drafted(draws, proposed)
        self._wanted = {row: min(n, vocabulary) for row, n in enumerate(logprobs) if n is not None}
        self._most = max(self._wanted.values(), default=0)
        self._asking: ml.Tensor | None = None
        self._there: nn.BatchSampler | None = None
        self._trying: tuple[nn.RejectionSampler, ml.Tensor] | None = None
        if draws and ctx.backend.devices[0].kind != "cpu":
            if vocabulary > _LARGEST_VOCABULARY:
                raise RunnerError(f"sampling: {vocabulary} tokens; there are at most {_LARGEST_VOCABULARY}")
            self._there = nn.BatchSampler(ctx, self._draws, vocabulary)
            if self._drafted is not None:
                tried = nn.RejectionSampler(
                    ctx, self._draws.of(np.array(self._tried)), self._drafted, vocabulary
                )
                self._trying = tried, ctx.from_numpy(np.array(self._tried, np.int32))
            if self._wanted:
                self._asking = ctx.from_numpy(np.array(list(self._wanted), np.int32))

    def __call__(self, ctx: ml.Context, logits: ml.Tensor) -> Chosen:
        """Draw from logits F32 (rows, vocabulary) on their device, with one transfer of two numbers per row.

        Log probabilities are part of the same transfer. Logits in host memory are sampled there.
        """
        if self._there is not None:
            return self._on_device(ctx, logits, self._there)
        host = (
            logits.to_numpy()
        )  # even without rows: pending work is computed, and its errors are raised here
        if not self._count:
            return Chosen(host)
        chosen = best = host.argmax(1)  # the first NaN, if there is one
        if self._draws.temperature.any():
            chosen = nn.sample_on_host(host, self._draws)
        if self._drafted is not None:
            tried = self._draws.of(np.array(self._tried))
            chosen[self._tried] = nn.reject_on_host(host[self._tried], tried, self._drafted)
        asking = list(self._wanted)
        logprobs = nn.logprobs_on_host(host[asking], chosen[asking], self._most) if asking else None
        return Chosen(np.array([chosen, host[np.arange(self._count), best]]).T, self._read(logprobs))

    def _on_device(self, ctx: ml.Context, logits: ml.Tensor, sampler: nn.BatchSampler) -> Chosen:
        tokens = sampler(ctx, logits)
        if self._trying is not None:
            tried, rows = self._trying
            tokens.set_rows(ctx, tried(ctx, logits.rows(ctx, rows)), rows)
        ids = tokens.cast(ctx, ml.DType.F32).reshape(ctx, self._count, 1)
        drawn = ids.concat(ctx, logits.max(ctx, 1, keepdims=True), 1)
        if self._asking is None:
            return Chosen(drawn.to_numpy())
        report = nn.logprobs(ctx, logits.rows(ctx, self._asking), tokens.rows(ctx, self._asking), self._most)
        whole = drawn.reshape(ctx, 2 * self._count).concat(
            ctx, report.reshape(ctx, math.prod(report.shape)), 0
        )
        host = whole.to_numpy()
        logprobs = host[2 * self._count :].reshape(report.shape)
        return Chosen(host[: 2 * self._count].reshape(self._count, 2), self._read(logprobs))

    def _read(self, logprobs: np.ndarray | None) -> dict[int, Logprobs]:
        """The results of ``nn.logprobs`` by row, for the rows that requested them."""
        if logprobs is None:
            return {}
        values, ids = np.split(logprobs, [self._most + 1], 1)
        rows = zip(self._wanted.items(), values.tolist(), ids.astype(np.int64).tolist(), strict=True)
        return {
            row: Logprobs(value[0], tuple(zip(likely[:count], value[1 : count + 1], strict=True)))
            for (row, count), value, likely in rows
        }


def _drafted(draws: Sequence[tuple[Sampler, int]], proposed: Sequence[Proposed]) -> nn.Drafted | None:
    """The proposed tokens, row by row; None if there are none."""
    if not proposed:
        return None
    uniform = [sampler.accepting(i) for sampler, i in (draws[each.row] for each in proposed)]
    tokens, probabilities = [each.token for each in proposed], [each.probabilities for each in proposed]
    return nn.Drafted(np.array(tokens), np.stack(probabilities), np.array(uniform))


def _is_real(value: object) -> bool:
    """Whether it is a finite number in the range of a float."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
