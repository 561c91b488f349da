"""Accepting draft tokens so that the result is distributed as without drafts.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), section 2.3; Chen et
al., "Accelerating Large Language Model Decoding with Speculative Sampling" (2023), theorem 1. If the draft x
was drawn from q, and the model would draw from p::

    accept x      with probability min(1, p(x) / q(x))
    otherwise     draw from max(0, p - q), scaled to a distribution

The token is distributed as p whatever q is, and x is accepted with probability 1 - TV(p, q), the sum of
min(p, q).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ml.dtypes import DType
from ml.errors import ShapeError
from ml.nn.sampling import BatchSampler, Draws, first_on_host, first_reaching, probabilities_on_host
from ml.nn.sequences import cumsum
from ml.protocols import Context, Tensor

_LEAST = float(np.finfo(np.float32).tiny)
"""The least probability of an accepted token: one with probability 0 is never accepted."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """A draft token for each row, and the distribution it was drawn from; host arrays.

    ``tokens`` (rows,), ``probabilities`` (rows, vocabulary), each row summing to 1. ``uniform`` (rows,) in
    (0, 1] decides whether the token is accepted; it is drawn independently of the token, and of
    ``Draws.uniform``, which decides its replacement.
    """

    tokens: np.ndarray
    probabilities: np.ndarray
    uniform: np.ndarray


class RejectionSampler:
    """Accepts or replaces the draft token of each row of logits on the device; nothing is read back.

    Its data is uploaded when it is created, as in ``BatchSampler``. A token of probability 0 is never chosen.

    Raises ShapeError for probabilities whose shape is not (rows, ``vocabulary``).
    """

    def __init__(self, ctx: Context, draws: Draws, drafted: Drafted, vocabulary: int) -> None:
        rows, shape = len(draws.uniform), drafted.probabilities.shape
        if shape != (rows, vocabulary):
            raise ShapeError(
                f"reject: probabilities {shape}; there must be one per token: {(rows, vocabulary)}"
            )
        self._target = BatchSampler(ctx, draws, vocabulary)
        self._tokens = ctx.from_numpy(drafted.tokens.astype(np.int32))
        self._places = ctx.from_numpy((drafted.tokens + np.arange(rows) * vocabulary).astype(np.int32))
        self._drafted = ctx.from_numpy(drafted.probabilities.astype(np.float32))
        own = drafted.probabilities[np.arange(rows), drafted.tokens]
        columns = np.stack((np.maximum(drafted.uniform * own, _LEAST), draws.uniform)).astype(np.float32)
        both = ctx.from_numpy(columns)
        self._least = both.slice(ctx, 0, 0, 1).reshape(ctx, rows)
        self._uniform = both.slice(ctx, 0, 1, 2).reshape(ctx, rows, 1)

    def __call__(self, ctx: Context, logits: Tensor) -> Tensor:
        """logits F32 (rows, vocabulary) -> I32 (rows,): the draft token if accepted, else its replacement.

        Raises ShapeError for a shape other than the one it was created for, or no rows.
        """
        target = self._target.probabilities(ctx, logits)
        rows, vocabulary = target.shape
        own = target.reshape(ctx, rows * vocabulary).rows(ctx, self._places)
        left = target.sub(ctx, self._drafted).relu(ctx)
        # Nothing is left if p and q are equal up to rounding.
        some = left.max(ctx, 1, keepdims=True).compare(ctx, ">", ctx.zeros((1, 1), DType.F32))
        instead = draw(ctx, some.where(ctx, left, target), self._uniform)
        return own.compare(ctx, ">=", self._least).where(ctx, self._tokens, instead)


def draw(ctx: Context, weights: Tensor, uniform: Tensor) -> Tensor:
    """weights >= 0, F32 (rows, n), and draws (rows, 1) in (0, 1] -> I32 (rows,): the index drawn in each
    row.
    """
    return first_reaching(ctx, weights, cumsum(ctx, weights), uniform)


def reject_on_host(logits: np.ndarray, draws: Draws, drafted: Drafted) -> np.ndarray:
    """As ``RejectionSampler``, for host logits (rows, vocabulary) of any float dtype; int64 (rows,)."""
    rows = np.arange(len(logits))
    target, proposed = probabilities_on_host(logits, draws), drafted.probabilities
    least = np.maximum(drafted.uniform * proposed[rows, drafted.tokens], _LEAST)
    accepted = target[rows, drafted.tokens] >= least
    left = np.maximum(target - proposed, 0)
    left = np.where(left.any(1, keepdims=True), left, target)
    tokens: np.ndarray = np.where(accepted, drafted.tokens, first_on_host(left.cumsum(1), draws.uniform))
    return tokens
