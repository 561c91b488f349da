"""Gated MLPs and mixtures of experts: routers, experts, and their tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import ml
from kvcache_engine.errors import ModelError
from kvcache_engine.weights import GroupedLinear, Linear, Loader, Shape
from ml import nn

__all__ = [
    "Activation",
    "GatedMLP",
    "GroupLimited",
    "Routing",
    "SparseMLP",
    "expert_shapes",
    "geglu",
    "group_routing",
    "load_corrected",
    "load_each_expert",
    "load_mlp",
    "mlp_shapes",
]

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

Activation = Callable[[ml.Context, ml.Tensor, ml.Tensor], ml.Tensor]
"""(ctx, gate, up) -> the gated product."""


def geglu(ctx: ml.Context, gate: ml.Tensor, up: ml.Tensor) -> ml.Tensor:
    """``gelu(gate) * up`` with the tanh approximation (Shazeer, 2020)."""
    return gate.gelu(ctx, "tanh").mul(ctx, up)


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """``down(activation(gate(x), up(x)))``; gate and up are one product, gate first."""

    gate_up: Linear
    down: Linear
    activation: Activation = nn.swiglu

    def __call__(self, ctx: ml.Context, x: ml.Tensor) -> ml.Tensor:
        both = self.gate_up(ctx, x)
        inner = both.shape[1] // 2
        gate, up = both.slice(ctx, 1, 0, inner), both.slice(ctx, 1, inner, 2 * inner)
        return self.down(ctx, self.activation(ctx, gate, up))


def load_mlp(load: Loader, ctx: ml.Context, prefix: str, activation: Activation = nn.swiglu) -> GatedMLP:
    """Load it from the tensors under ``prefix``."""
    gate, up, down = (f"{prefix}.{name}" for name in PROJECTIONS)
    return GatedMLP(load.linear(ctx, gate, up), load.summed(ctx, down), activation)


def mlp_shapes(
    prefix: str, hidden: int, inner: int, bias: bool = False, names: Sequence[str] = PROJECTIONS
) -> dict[str, Shape]:
    """The tensors that ``load_mlp`` reads."""
    shapes: dict[str, Shape] = {}
    for name, (rows, columns) in zip(names, ((inner, hidden), (inner, hidden), (hidden, inner)), strict=True):
        shapes[f"{prefix}.{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{prefix}.{name}.bias"] = (rows,)
    return shapes


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts (Shazeer et al., 2017): every token goes through k of them, all gated MLPs.

    The (token, expert) pairs are sorted by expert on the device, so that each expert has one run of rows.
    """

    gate_up: GroupedLinear
    down: GroupedLinear

    def __call__(
        self,
        ctx: ml.Context,
        x: ml.Tensor,
        weights: ml.Tensor,
        chosen: ml.Tensor,
    ) -> ml.Tensor:
        """x (tokens, hidden), weights (tokens, k), chosen I32 (tokens, k) -> (tokens, hidden)."""
        (tokens, k), hidden = chosen.shape, x.shape[1]
        pairs = chosen.reshape(ctx, tokens * k)
        order = pairs.argsort(ctx)
        experts = nn.Groups(pairs.rows(ctx, order))
        share = weights.reshape(ctx, tokens * k, 1).rows(ctx, order)
        if tokens == 1:
            inputs = x.view(ctx, 0, (k, hidden), (0, x.strides[1]))
        else:
            token = ctx.arange(0, tokens, 1, ml.DType.I32).view(ctx, 0, (tokens, k), (1, 0)).contiguous(ctx)
            inputs = x.rows(ctx, token.reshape(ctx, tokens * k).rows(ctx, order))
        both = self.gate_up(ctx, inputs, experts)
        inner = both.shape[1] // 2
        gate, up = both.slice(ctx, 1, 0, inner), both.slice(ctx, 1, inner, 2 * inner)
        result = self.down(ctx, nn.swiglu(ctx, gate, up), experts).mul(ctx, share)
        if tokens == 1:  # the order of addition does not matter
            return result.sum(ctx, 0, keepdims=True)
        return result.rows(ctx, order.argsort(ctx)).reshape(ctx, tokens, k, hidden).sum(ctx, 1)


Routing = Literal["softmax", "normalized"]
"""The weights of the selected experts: their softmax probabilities over all experts, or these scaled to sum
to 1 (``norm_topk_prob``).
"""


@dataclass(frozen=True, slots=True)
class GroupLimited:
    """DeepSeek's routing: experts are selected within the ``kept`` best of ``groups`` groups.

    An expert's score is its softmax probability, and a group's score is that of its best expert (DeepSeek-AI,
    "DeepSeek-V2", 2024). With ``correction``, F32 (experts,), the score is a sigmoid, experts are selected by
    score plus correction, and a group's score is the sum of its two best (DeepSeek-AI, "DeepSeek-V3", 2024).
    Weights are the scores without correction, divided by their sum with ``normalize``, times ``scale``.
    ``corrected``: there is a correction once weights are loaded.
    """

    groups: int
    kept: int
    scale: float
    normalize: bool
    corrected: bool
    correction: ml.Tensor | None = None

    def __call__(self, ctx: ml.Context, logits: ml.Tensor, count: int) -> tuple[ml.Tensor, ml.Tensor]:
        """logits F32 (tokens, experts) -> weights and experts I32, both (tokens, count)."""
        if self.correction is None:
            scores = logits.softmax(ctx)
            weights, chosen = self._in_groups(ctx, scores, 0.0).top_k(ctx, count)
        else:
            scores = logits.sigmoid(ctx)
            corrected = scores.add(ctx, self.correction)
            _, chosen = self._in_groups(ctx, corrected, -math.inf).top_k(ctx, count)
            weights = _picked(ctx, scores, chosen)
        if self.normalize:
            weights = weights.div(ctx, weights.sum(ctx, 1, keepdims=True))
        return weights.scale(ctx, self.scale), chosen

    def _in_groups(self, ctx: ml.Context, scores: ml.Tensor, left_out: float) -> ml.Tensor:
        """The scores, with those of other groups replaced by ``left_out``."""
        if self.kept == self.groups:
            return scores
        tokens, experts = scores.shape
        size, best = experts // self.groups, 1 if self.correction is None else 2
        members = scores.reshape(ctx, tokens, self.groups, size)
        worth = members.top_k(ctx, min(best, size))[0].sum(ctx, 2)
        kept = worth.top_k(ctx, self.kept)[1].reshape(ctx, tokens, self.kept, 1)
        hits = kept.compare(ctx, "==", ctx.arange(0, self.groups, 1, ml.DType.I32))
        shown = hits.cast(ctx, ml.DType.F32).sum(ctx, 1).compare(ctx, ">", ctx.zeros((1,), ml.DType.F32))
        other = ctx.full((1,), left_out, ml.DType.F32)
        masked = shown.reshape(ctx, tokens, self.groups, 1).where(ctx, members, other)
        return masked.reshape(ctx, tokens, experts)


def group_routing(raw: Mapping[str, Any], corrected: bool = True) -> GroupLimited:
    """The routing in groups according to config.json. Raises ModelError for inconsistent groups."""
    grouped = raw.get("topk_method") != "greedy"
    groups, kept = (raw["n_group"] or 1, raw["topk_group"] or 1) if grouped else (1, 1)
    experts, chosen = raw["n_routed_experts"], raw["num_experts_per_tok"]
    if experts % groups or not 1 <= kept <= groups or chosen > kept * (experts // groups):
        raise ModelError(
            f"{chosen} of {experts} experts within {kept} of {groups} groups; groups must have equal sizes, "
            "and the kept ones must have at least as many experts as are chosen"
        )
    scale, normalize = float(raw["routed_scaling_factor"]), bool(raw["norm_topk_prob"])
    return GroupLimited(groups, kept, scale, normalize, corrected)


def _picked(ctx: ml.Context, scores: ml.Tensor, chosen: ml.Tensor) -> ml.Tensor:
    """The scores (tokens, experts) of ``chosen`` I32 (tokens, count)."""
    (tokens, experts), count = scores.shape, chosen.shape[1]
    lines = ctx.arange(0, tokens * experts, experts, ml.DType.I32).reshape(ctx, tokens, 1)
    at = chosen.add(ctx, lines).reshape(ctx, tokens * count)
    return scores.reshape(ctx, tokens * experts).rows(ctx, at).reshape(ctx, tokens, count)


@dataclass(frozen=True, slots=True)
class SparseMLP:
    """``experts_per_token`` of the experts for each token, and optionally a ``shared`` expert for all.

    The router computes in the dtype of its weight. ``shared_gate`` maps a token to a logit, whose sigmoid
    multiplies the shared expert's output.
    """

    router: Linear
    experts: Experts
    experts_per_token: int
    routing: Routing | GroupLimited
    shared: GatedMLP | None = None
    shared_gate: Linear | None = None

    def __call__(self, ctx: ml.Context, x: ml.Tensor) -> ml.Tensor:
        """x (tokens, hidden) -> the same."""
        if x.shape[0] == 0:
            return x
        weights, chosen = self._route(ctx, x)
        result = self.experts(ctx, x, weights, chosen)
        if self.shared is None:
            return result
        shared = self.shared(ctx, x)
        if self.shared_gate is not None:
            shared = shared.mul(ctx, self.shared_gate(ctx, x).sigmoid(ctx))
        return result.add(ctx, shared)

    def _route(self, ctx: ml.Context, x: ml.Tensor) -> tuple[ml.Tensor, ml.Tensor]:
        """Weights in x's dtype and experts I32, both (tokens, experts_per_token)."""
        wanted = self.router.weight.dtype
        logits = self.router(ctx, x if x.dtype is wanted else x.cast(ctx, wanted))
        if logits.dtype is not ml.DType.F32:
            logits = logits.cast(ctx, ml.DType.F32)
        if isinstance(self.routing, GroupLimited):
            weights, chosen = self.routing(ctx, logits, self.experts_per_token)
            return weights.cast(ctx, x.dtype), chosen
        weights, chosen = logits.softmax(ctx).top_k(ctx, self.experts_per_token)
        if self.routing == "normalized":
            weights = weights.div(ctx, weights.sum(ctx, 1, keepdims=True))
        return weights.contiguous(ctx).cast(ctx, x.dtype), chosen


def load_each_expert(
    load: Loader, ctx: ml.Context, prefix: str, count: int, names: Sequence[str] = PROJECTIONS
) -> Experts:
    """Load experts stored separately as gated MLPs ``{prefix}.{i}``; ``names`` are those of gate, up and
    down.
    """
    gate, up, down = names
    each = [f"{prefix}.{i}" for i in range(count)]
    wide = (load.rows(f"{name}.{gate}", f"{name}.{up}") for name in each)
    narrow = (load.rows(f"{name}.{down}") for name in each)
    return Experts(load.grouped(ctx, count, wide), load.grouped(ctx, count, narrow))


def expert_shapes(
    prefix: str, count: int, hidden: int, inner: int, names: Sequence[str] = PROJECTIONS
) -> dict[str, Shape]:
    """The tensors that ``load_each_expert`` reads."""
    shapes: dict[str, Shape] = {}
    for i in range(count):
        shapes |= mlp_shapes(f"{prefix}.{i}", hidden, inner, names=names)
    return shapes


def load_corrected(
    load: Loader, ctx: ml.Context, prefix: str, routing: GroupLimited
) -> tuple[Linear, GroupLimited]:
    """Load the router ``prefix``, and its routing with the correction; both are F32, as in the reference."""
    router = load.put(ctx, load.take(f"{prefix}.weight"), ml.DType.F32).permute(ctx, 1, 0)
    if routing.corrected:
        correction = load.take(f"{prefix}.e_score_correction_bias")
        routing = replace(routing, correction=load.put(ctx, correction, ml.DType.F32))
    return Linear(router), routing
