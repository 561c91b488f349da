"""Choosing the next token from logits, on the host."""

from __future__ import annotations

import math
import secrets

import numpy as np

from kvcache.runner.errors import RequestError, RunnerError

__all__ = ["Sampler"]


class Sampler:
    """Greedy at ``temperature`` 0, else a draw from softmax(logits / temperature), cut by top-k and top-p.

    ``top_k`` keeps the k likeliest tokens (0: all). ``top_p`` then keeps the smallest set of the
    likeliest whose probability together reaches p, and never fewer than one (Holtzman et al., 2020).
    Ties go to the lower token id. The same ``seed`` gives the same draws; None takes a new one.
    Each ``stream`` of a seed has draws of its own: one per sequence makes its text independent of what
    else is in the batch.

    Raises RequestError for a setting outside its range.
    """

    def __init__(
        self,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stream: int | None = None,
    ) -> None:
        if not (math.isfinite(temperature) and temperature >= 0):
            raise RequestError(f"Sampler: temperature={temperature}; it must be at least 0 (0 is greedy)")
        if top_k < 0:
            raise RequestError(f"Sampler: top_k={top_k}; it must be at least 0 (0 keeps every token)")
        if not 0 < top_p <= 1:
            raise RequestError(f"Sampler: top_p={top_p}; it must be in (0, 1]")
        if seed is not None and seed < 0:
            raise RequestError(f"Sampler: seed={seed}; it must be at least 0")
        self.temperature = temperature
        self.top_k = top_k
        self.top_p = top_p
        self.seed = secrets.randbits(32) if seed is None else seed
        self._random = np.random.default_rng(self.seed if stream is None else (self.seed, stream))

    def __call__(self, logits: np.ndarray) -> int:
        """One token id from ``logits`` (vocab,). Raises RunnerError where no logit can be chosen."""
        best = int(np.argmax(logits))  # the first NaN, if there is one
        if not np.isfinite(logits[best]):
            raise RunnerError(
                f"Sampler: logit {best} is {logits[best]}; the forward pass overflowed: try a wider dtype"
            )
        if self.temperature == 0:
            return best
        tokens, probabilities = self.distribution(logits)
        edges = np.cumsum(probabilities)
        drawn = np.searchsorted(edges, self._random.random() * edges[-1], side="right")
        return int(tokens[min(int(drawn), len(tokens) - 1)])

    def distribution(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The token ids that may be drawn, likeliest first, and their probabilities (float64, sum 1)."""
        values = np.asarray(logits, np.float64)
        if self.temperature == 0:
            return np.array([int(np.argmax(values))]), np.ones(1)
        order = _likeliest(values, self.top_k)
        with np.errstate(over="ignore"):  # a tiny temperature sends the rest to -inf: probability 0
            weights = np.exp((values[order] - values[order[0]]) / self.temperature)
        weights /= weights.sum()
        if self.top_p < 1:
            kept = int(np.searchsorted(np.cumsum(weights), self.top_p)) + 1
            order, weights = order[:kept], weights[:kept]
        possible = weights > 0
        return order[possible], weights[possible] / weights[possible].sum()


def _likeliest(values: np.ndarray, k: int) -> np.ndarray:
    """Indices of the ``k`` largest (0: of all), descending, the lower index first among equals."""
    if not 0 < k < len(values):
        return np.argsort(-values, kind="stable")
    edge = np.partition(values, -k)[-k]  # sorting only what reaches it spares a large vocabulary
    candidates = np.flatnonzero(values >= edge)
    return candidates[np.argsort(-values[candidates], kind="stable")[:k]]
