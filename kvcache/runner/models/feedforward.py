"""Gated MLPs, and mixtures of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ml
from kvcache.runner.weights import GroupedLinear, Linear, Loader, Shape
from ml import nn

__all__ = ["PROJECTIONS", "Activation", "Experts", "GatedMLP", "geglu", "load_mlp", "mlp_shapes", "swiglu"]

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

Activation = Callable[[ml.Context, ml.Tensor, ml.Tensor], ml.Tensor]
"""(ctx, gate, up) -> the gated product."""

swiglu: Activation = nn.swiglu


def geglu(ctx: ml.Context, gate: ml.Tensor, up: ml.Tensor) -> ml.Tensor:
    """``gelu(gate) * up`` with the tanh approximation (Shazeer, 2020)."""
    return gate.gelu(ctx, "tanh").mul(ctx, up)


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """``down(activation(gate(x), up(x)))``; gate and up are one product, gate first."""

    gate_up: Linear
    down: Linear
    activation: Activation = swiglu

    def __call__(self, ctx: ml.Context, x: ml.Tensor) -> ml.Tensor:
        both = self.gate_up(ctx, x)
        inner = both.shape[1] // 2
        gate, up = both.slice(ctx, 1, 0, inner), both.slice(ctx, 1, inner, 2 * inner)
        return self.down(ctx, self.activation(ctx, gate, up))


def load_mlp(
    load: Loader,
    ctx: ml.Context,
    prefix: str,
    activation: Activation = swiglu,
    names: Sequence[str] = PROJECTIONS,
) -> GatedMLP:
    """Of the tensors below ``prefix``; ``names`` of gate, up and down."""
    gate, up, down = (f"{prefix}.{name}" for name in names)
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
    """A mixture of experts (Shazeer et al., 2017): every token goes through k of them, gated MLPs all.

    The pairs (token, expert) are sorted by expert on the device, so that each expert is one run of rows.
    """

    gate_up: GroupedLinear
    down: GroupedLinear
    activation: Activation = swiglu

    def __call__(
        self,
        ctx: ml.Context,
        x: ml.Tensor,
        weights: ml.Tensor,
        chosen: ml.Tensor,
        weigh_input: bool = False,
    ) -> ml.Tensor:
        """x (tokens, hidden), weights (tokens, k), chosen I32 (tokens, k) -> (tokens, hidden).

        The weights multiply what comes out of the experts, or what goes in (``weigh_input``).
        """
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
        both = self.gate_up(ctx, inputs.mul(ctx, share) if weigh_input else inputs, experts)
        inner = both.shape[1] // 2
        gate, up = both.slice(ctx, 1, 0, inner), both.slice(ctx, 1, inner, 2 * inner)
        result = self.down(ctx, self.activation(ctx, gate, up), experts)
        if not weigh_input:
            result = result.mul(ctx, share)
        if tokens == 1:  # in whatever order they are added up
            return result.sum(ctx, 0, keepdims=True)
        return result.rows(ctx, order.argsort(ctx)).reshape(ctx, tokens, k, hidden).sum(ctx, 1)
