"""Mixtures of experts: their routers, and the tensors that hold them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

import ml
from kvcache.runner.models.feedforward import Activation, Experts, GatedMLP, swiglu
from kvcache.runner.weights import Linear, Loader

__all__ = ["Routing", "SparseMLP", "load_experts"]

Routing = Literal["softmax", "normalized", "softmax of top", "sigmoid of top"]
"""What the weights of the chosen experts are: their share of the softmax over all experts (Qwen),
scaled to sum to 1 (Qwen with norm_topk_prob), the softmax over the chosen alone (gpt-oss), or the
sigmoid of each, which multiplies the expert's input (Llama 4)."""


@dataclass(frozen=True, slots=True)
class SparseMLP:
    """``experts_per_token`` of the experts for each token, and a ``shared`` one for all.

    ``shared_gate`` maps a token to the logit that its share of the shared expert is the sigmoid of.
    """

    router: Linear
    experts: Experts
    experts_per_token: int
    routing: Routing
    shared: GatedMLP | None = None
    shared_gate: Linear | None = None

    def __call__(self, ctx: ml.Context, x: ml.Tensor) -> ml.Tensor:
        """x (tokens, hidden) -> the same."""
        if x.shape[0] == 0:
            return x
        weights, chosen = self._route(ctx, x)
        result = self.experts(ctx, x, weights, chosen, self.routing == "sigmoid of top")
        if self.shared is None:
            return result
        shared = self.shared(ctx, x)
        if self.shared_gate is not None:
            shared = shared.mul(ctx, self.shared_gate(ctx, x).sigmoid(ctx))
        return result.add(ctx, shared)

    def _route(self, ctx: ml.Context, x: ml.Tensor) -> tuple[ml.Tensor, ml.Tensor]:
        """Weights in x's dtype and experts I32, both (tokens, experts_per_token)."""
        logits = self.router(ctx, x)
        if logits.dtype is not ml.DType.F32:
            logits = logits.cast(ctx, ml.DType.F32)
        over_all = self.routing in ("softmax", "normalized")
        scores = logits.softmax(ctx) if over_all else logits
        weights, chosen = scores.top_k(ctx, self.experts_per_token)
        if self.routing == "normalized":
            weights = weights.div(ctx, weights.sum(ctx, 1, keepdims=True))
        elif self.routing == "softmax of top":
            weights = weights.softmax(ctx)
        elif self.routing == "sigmoid of top":
            weights = weights.sigmoid(ctx)
        return weights.contiguous(ctx).cast(ctx, x.dtype), chosen


def load_experts(
    load: Loader,
    ctx: ml.Context,
    prefix: str,
    activation: Activation = swiglu,
    arrange: Callable[[np.ndarray], np.ndarray] = lambda rows: rows,
) -> Experts:
    """Of ``{prefix}.gate_up_proj`` (experts, hidden, 2 * inner) and ``down_proj`` (experts, inner, hidden).

    With biases ``gate_up_proj_bias`` (experts, 2 * inner) and ``down_proj_bias`` where the config has
    them. ``arrange`` puts the rows of gate and up (2 * inner, ...) in our order, all of gate first.
    """
    wide, narrow = (load.take(f"{prefix}.{name}_proj").swapaxes(1, 2) for name in ("gate_up", "down"))
    wide_bias, narrow_bias = (_biases(load, f"{prefix}.{name}_proj_bias") for name in ("gate_up", "down"))
    if wide_bias is not None:
        wide_bias = np.stack([arrange(bias) for bias in wide_bias])
    return Experts(
        load.grouped(ctx, len(wide), map(arrange, wide), wide_bias),
        load.grouped(ctx, len(narrow), narrow, narrow_bias),
        activation,
    )


def _biases(load: Loader, name: str) -> np.ndarray | None:
    return load.take(name) if name in load.shapes else None
