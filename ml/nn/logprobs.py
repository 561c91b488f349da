"""Log probabilities of tokens under logits: on the device, or from an array on the host.

Both compute the same values; the host uses float64.
"""

from __future__ import annotations

import numpy as np

from ml.dtypes import DType
from ml.errors import ShapeError
from ml.protocols import Context, Tensor
from ml.selection import largest


def logprobs(ctx: Context, logits: Tensor, tokens: Tensor, most: int) -> Tensor:
    """log softmax of logits F32 (rows, vocabulary): F32 (rows, 1 + 2 * most); nothing is read back to the
    host.

    For each row: the log probability of its token in ``tokens`` I32 (rows,); those of its ``most`` likeliest
    tokens, descending, ties by lower id; and their ids, exact up to 2**24. Raises ShapeError for incompatible
    shapes.
    """
    rows, vocabulary = _checked(logits.shape, tokens.shape, most)
    peak = logits.max(ctx, 1, keepdims=True)
    total = logits.sub(ctx, peak).exp(ctx).sum(ctx, 1, keepdims=True).log(ctx)
    places = tokens.add(ctx, ctx.arange(0, rows * vocabulary, vocabulary, DType.I32))
    values = logits.reshape(ctx, rows * vocabulary, 1).rows(ctx, places)
    if not most:
        return values.sub(ctx, peak).sub(ctx, total)
    top, ids = logits.top_k(ctx, most)
    logs = values.concat(ctx, top, 1).sub(ctx, peak).sub(ctx, total)
    return logs.concat(ctx, ids.cast(ctx, DType.F32), 1)


def logprobs_on_host(logits: np.ndarray, tokens: np.ndarray, most: int) -> np.ndarray:
    """As ``logprobs``, for host logits (rows, vocabulary) of any float dtype; float64."""
    rows, _ = _checked(logits.shape, tokens.shape, most)
    with np.errstate(all="ignore"):
        x = logits.astype(np.float64)
        x -= x.max(1, keepdims=True)
        total = np.log(np.exp(x).sum(1, keepdims=True))
    ids = largest(logits, most) if most else np.empty((rows, 0), np.intp)
    values = np.take_along_axis(x, np.concatenate((tokens[:, None], ids), 1), 1)
    return np.concatenate((values - total, ids), 1)


def _checked(logits: tuple[int, ...], tokens: tuple[int, ...], most: int) -> tuple[int, int]:
    if len(logits) != 2 or tokens != logits[:1] or not 0 <= most <= logits[1]:
        raise ShapeError(
            f"logprobs: logits {logits}, tokens {tokens}, the {most} likeliest; logits must be "
            "(rows, vocabulary), tokens (rows,), and the likeliest in [0, vocabulary]"
        )
    return logits[0], logits[1]
