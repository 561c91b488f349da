"""Sampling tokens from logits for a whole batch, on the device or from a host array.

Both give the same tokens. If the device is the host, NumPy computes it in a few steps in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ml.dtypes import DType
from ml.errors import ShapeError
from ml.nn.sequences import cumsum
from ml.protocols import Context, Tensor
from ml.selection import largest

_STEEPEST = 1e30
"""The largest 1 / temperature, so that a temperature close to 0 stays finite in F32."""


@dataclass(frozen=True, slots=True)
class Draws:
    """The sampling parameters of each row; host arrays (rows,).

    ``temperature`` 0 takes the first of the largest logits. ``top_k`` keeps that many of the likeliest tokens
    (0: all), then ``top_p`` the smallest set of the likeliest whose total probability reaches p, then
    ``min_p`` those whose probability is at least that fraction of the highest (Nguyen et al., 2024; 0 or
    None: all). ``uniform`` in (0, 1] decides which of these is drawn.
    """

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    uniform: np.ndarray
    min_p: np.ndarray | None = None

    @property
    def least(self) -> np.ndarray:
        """``min_p`` of each row."""
        return np.zeros_like(self.uniform) if self.min_p is None else self.min_p

    def of(self, rows: np.ndarray) -> Draws:
        """The parameters of some of the rows."""
        columns = self.temperature, self.top_k, self.top_p, self.uniform, self.least
        return Draws(*(column[rows] for column in columns))


class BatchSampler:
    """Samples a token for each row of logits on the device; nothing is read back.

    Its data is uploaded when it is created: create it before the forward pass is queued, so that the upload
    does not wait for the pass. The token is the first whose cumulative probability reaches ``uniform``, in
    the order of ids or, if the distribution is truncated, likeliest first and ties by lower id. A row depends
    only on its own logits and draw, and is the same on every backend unless ``uniform``, or the threshold of
    ``top_p`` or ``min_p``, is within F32 rounding of an edge. A token of probability 0 is never drawn.

    >>> import ml, ml.nn
    >>> import numpy as np
    >>> draws = ml.nn.Draws(np.zeros(1), np.zeros(1, int), np.ones(1), np.full(1, 0.5))    # greedy
    >>> with ml.open_backend("numpy") as backend, backend.new_context() as ctx:
    ...     sampler = ml.nn.BatchSampler(ctx, draws, 3)
    ...     sampler(ctx, ctx.from_numpy([[0.0, 2.0, 1.0]])).to_numpy().tolist()
    [1]
    """

    def __init__(self, ctx: Context, draws: Draws, vocabulary: int) -> None:
        self._shape = (len(draws.uniform), vocabulary)
        kinds = _kinds(draws, vocabulary)
        alone = len(kinds) == 1
        self._groups = [_Group(ctx, draws, kind, mine, alone, vocabulary) for kind, mine in kinds]
        self._back: Tensor | None = None
        if not alone:
            order = np.argsort(np.concatenate([mine for _, mine in kinds]))
            self._back = ctx.from_numpy(order.astype(np.int32))

    def __call__(self, ctx: Context, logits: Tensor) -> Tensor:
        """logits F32 (rows, vocabulary) -> I32 (rows,); the token of a row with NaN or +inf is unspecified.

        Raises ShapeError for a shape other than the one it was created for, or no rows.
        """
        self._check(logits)
        return self._joined(ctx, [group(ctx, logits) for group in self._groups])

    def probabilities(self, ctx: Context, logits: Tensor) -> Tensor:
        """logits F32 (rows, vocabulary) -> F32 of the same shape: the probability of drawing each token.

        Raises ShapeError as ``__call__`` does.
        """
        self._check(logits)
        return self._joined(ctx, [group.probabilities(ctx, logits) for group in self._groups])

    def _joined(self, ctx: Context, parts: list[Tensor]) -> Tensor:
        joined = parts[0]
        for part in parts[1:]:
            joined = joined.concat(ctx, part, 0)
        return joined if self._back is None else joined.rows(ctx, self._back)

    def _check(self, logits: Tensor) -> None:
        if logits.shape != self._shape or not self._groups:
            raise ShapeError(
                f"sample: logits {logits.shape}; the draws are for {self._shape} and need at least one row"
            )


def sample_on_host(logits: np.ndarray, draws: Draws) -> np.ndarray:
    """As ``BatchSampler``, for host logits (rows, vocabulary) of any float dtype; int64 (rows,)."""
    tokens = np.empty(len(logits), np.int64)
    with np.errstate(all="ignore"):
        for kind, mine in _kinds(draws, logits.shape[1]):
            body = (_greedy_on_host, _whole_on_host, _cut_on_host)[kind]
            if len(mine) == len(logits):
                return body(logits, draws)
            tokens[mine] = body(logits[mine], draws.of(mine))
    return tokens


def probabilities_on_host(logits: np.ndarray, draws: Draws) -> np.ndarray:
    """As ``BatchSampler.probabilities``, for host logits (rows, vocabulary) of any float dtype; float64."""
    probabilities = np.zeros(logits.shape)
    with np.errstate(all="ignore"):
        for kind, mine in _kinds(draws, logits.shape[1]):
            rows, ids, own = mine[:, None], np.arange(logits.shape[1])[None], draws.of(mine)
            if kind == 0:
                probabilities[mine, logits[mine].argmax(1)] = 1
                continue
            if kind == 1:
                weights = _weights_on_host(logits[mine], logits[mine].max(1, keepdims=True), own)
            else:
                ids, edges = _cut_edges_on_host(logits[mine], own)
                weights = np.diff(edges, axis=1, prepend=0)
            probabilities[rows, ids] = weights / weights.sum(1, keepdims=True)
    return probabilities


def _kinds(draws: Draws, vocabulary: int) -> list[tuple[int, np.ndarray]]:
    """Rows by kind: 0 is greedy, 1 samples from all tokens, 2 from some."""
    kind = [
        0 if temperature == 0 else 1 + (p < 1 or least > 0 or 0 < k < vocabulary)
        for temperature, k, p, least in zip(
            draws.temperature.tolist(), draws.top_k.tolist(), draws.top_p.tolist(), draws.least.tolist(),
            strict=True,
        )
    ]  # fmt: skip
    return [(i, np.flatnonzero(np.array(kind) == i)) for i in sorted(set(kind))]


class _Group:
    """Rows of one kind and their parameters, each a column (rows, 1) on the device."""

    def __init__(
        self, ctx: Context, draws: Draws, kind: int, mine: np.ndarray, alone: bool, vocabulary: int
    ) -> None:
        self._kind = kind
        self._body = (self._greedy, self._whole, self._cut)[kind]
        self._rows = None if alone else ctx.from_numpy(mine.astype(np.int32))
        if kind == 0:
            return
        kept = np.where(draws.top_k > 0, draws.top_k, vocabulary)[mine]
        p, least = draws.top_p[mine], draws.least[mine]
        self._width = min(int(kept.max()), vocabulary)
        self._by_size, self._by_share = bool(kept.min() < self._width), bool(p.min() < 1)
        self._by_peak = bool(least.max() > 0)
        with np.errstate(divide="ignore", over="ignore"):
            steepness = np.minimum(1 / draws.temperature[mine], _STEEPEST)
        # Without top_p, tokens beyond the rounded total count too.
        columns = np.stack((steepness, draws.uniform[mine], kept, np.where(p < 1, p, 2.0), least))
        whole = ctx.from_numpy(columns.astype(np.float32))
        self._steepness, self._uniform, self._kept, self._share, self._least = (
            whole.slice(ctx, 0, i, i + 1).reshape(ctx, len(mine), 1) for i in range(5)
        )

    def __call__(self, ctx: Context, logits: Tensor) -> Tensor:
        return self._body(ctx, logits if self._rows is None else logits.rows(ctx, self._rows))

    def probabilities(self, ctx: Context, logits: Tensor) -> Tensor:
        mine = logits if self._rows is None else logits.rows(ctx, self._rows)
        rows, vocabulary = mine.shape
        if self._kind == 1:
            weights = self._weights(ctx, mine, mine.max(ctx, 1, keepdims=True))
            return weights.div(ctx, weights.sum(ctx, 1, keepdims=True))
        if self._kind == 0:
            weights, ids = ctx.full((rows, 1), 1, DType.F32), mine.argmax(ctx, 1).reshape(ctx, rows, 1)
        else:
            weights, _, ids = self._kept_weights(ctx, mine)
        shares = weights.div(ctx, weights.sum(ctx, 1, keepdims=True))
        begins = ctx.arange(0, rows * vocabulary, vocabulary, DType.I32).reshape(ctx, rows, 1)
        places, count = ids.add(ctx, begins), math.prod(ids.shape)
        flat = ctx.zeros((rows * vocabulary, 1), DType.F32)
        flat.set_rows(ctx, shares.reshape(ctx, count, 1), places.reshape(ctx, count))
        return flat.reshape(ctx, rows, vocabulary)

    def _greedy(self, ctx: Context, logits: Tensor) -> Tensor:
        return logits.argmax(ctx, 1)

    def _whole(self, ctx: Context, logits: Tensor) -> Tensor:
        """Sample from all tokens, in the order of their ids."""
        weights = self._weights(ctx, logits, logits.max(ctx, 1, keepdims=True))
        return first_reaching(ctx, weights, cumsum(ctx, weights), self._uniform)

    def _cut(self, ctx: Context, logits: Tensor) -> Tensor:
        """Sample from the likeliest tokens, in descending order."""
        rows, width = logits.shape[0], self._width
        weights, edges, ids = self._kept_weights(ctx, logits)
        place = first_reaching(ctx, weights, edges, self._uniform)
        place = place.add(ctx, ctx.arange(0, rows * width, width, DType.I32))
        return ids.reshape(ctx, rows * width).rows(ctx, place)

    def _kept_weights(self, ctx: Context, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The weights of the likeliest tokens, 0 for those that are cut; running sums before the cut; and
        their ids.
        """
        width = self._width
        values, ids = logits.top_k(ctx, width)
        zero = ctx.zeros((1, 1), DType.F32)
        weights = self._weights(ctx, values, values.slice(ctx, 1, 0, 1))
        if self._by_size:
            places = ctx.arange(0, width, 1, DType.F32).reshape(ctx, 1, width)
            weights = places.compare(ctx, "<", self._kept).where(ctx, weights, zero)
        edges = cumsum(ctx, weights)
        if self._by_share:
            reached = edges.max(ctx, 1, keepdims=True).mul(ctx, self._share)
            weights = edges.sub(ctx, weights).compare(ctx, "<", reached).where(ctx, weights, zero)
        if self._by_peak:  # the likeliest weighs 1
            weights = weights.compare(ctx, ">=", self._least).where(ctx, weights, zero)
        return weights, edges, ids

    def _weights(self, ctx: Context, values: Tensor, peak: Tensor) -> Tensor:
        return values.sub(ctx, peak).mul(ctx, self._steepness).exp(ctx)


def first_reaching(ctx: Context, weights: Tensor, edges: Tensor, uniform: Tensor) -> Tensor:
    """The first index with a positive weight whose edge reaches ``uniform`` times the last edge; I32
    (rows,).
    """
    zero, none = ctx.zeros((1, 1), DType.F32), ctx.full((1, 1), -1, DType.F32)
    edges = zero.compare(ctx, "<", weights).where(ctx, edges, none)
    target = edges.max(ctx, 1, keepdims=True).mul(ctx, uniform)
    return edges.compare(ctx, ">=", target).argmax(ctx, 1)


def _greedy_on_host(logits: np.ndarray, _: Draws) -> np.ndarray:
    tokens: np.ndarray = logits.argmax(1)
    return tokens


def _whole_on_host(logits: np.ndarray, draws: Draws) -> np.ndarray:
    weights = _weights_on_host(logits, logits.max(1, keepdims=True), draws)
    return first_on_host(weights.cumsum(1), draws.uniform)


def _cut_on_host(logits: np.ndarray, draws: Draws) -> np.ndarray:
    ids, edges = _cut_edges_on_host(logits, draws)
    tokens: np.ndarray = ids[np.arange(len(logits)), first_on_host(edges, draws.uniform)]
    return tokens


def _cut_edges_on_host(logits: np.ndarray, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
    """The likeliest tokens of each row, descending, and the running sums of their weights."""
    rows = np.arange(len(logits))
    kept = np.where(draws.top_k > 0, draws.top_k, logits.shape[1])
    width = min(int(kept.max()), logits.shape[1])
    ids = largest(logits, width)
    values = logits[rows[:, None], ids]
    weights = _weights_on_host(values, values[:, :1], draws)
    if kept.min() < width:
        weights[np.arange(width) >= kept[:, None]] = 0
    edges = weights.cumsum(1)
    if draws.top_p.min() < 1:
        reached = edges[:, -1:] * draws.top_p[:, None]
        last = np.minimum((edges < reached).sum(1), width - 1)
        np.minimum(edges, edges[rows, last, None], out=edges)
    if draws.least.max() > 0:  # the likeliest weighs 1
        last = np.maximum((weights >= draws.least[:, None]).sum(1) - 1, 0)
        np.minimum(edges, edges[rows, last, None], out=edges)
    return ids, edges


def _weights_on_host(values: np.ndarray, peak: np.ndarray, draws: Draws) -> np.ndarray:
    weights: np.ndarray = values.astype(np.float64)
    weights -= peak
    weights /= np.maximum(draws.temperature, 1 / _STEEPEST)[:, None]
    np.exp(weights, out=weights)
    return weights


def first_on_host(edges: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """The first index of each row whose edge reaches ``uniform`` times the last edge."""
    first: np.ndarray = (edges < edges[:, -1:] * uniform[:, None]).sum(1)
    return first
