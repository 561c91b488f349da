"""Alternating updates: several streams of hidden states, of which a layer computes one.

Baykal et al., "Alternating Updates for Efficient Transformers", NeurIPS 2023 (arXiv 2301.13310);
transformers' modeling_gemma3n.py. With m = tanh(router(norm(active)) / hidden_size), one number per stream::

    predict    streams[i] += sum over j of P(m)[i, j] streams[j]
    correct    streams[i] += (1 + C(m)[i]) (computed - streams[active])      m of what was computed
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

import ml
from kvcache.runner.weights import Linear, Loader, Shape

__all__ = ["AltUp", "altup_shapes", "load_altup", "magnitude", "rescaled"]

_SMALLEST = 1e-5
"""What a mean square counts as at least, where it divides."""


@dataclass(frozen=True, slots=True)
class AltUp:
    """Of one layer. ``corrections`` has a bias of ones; ``scale`` (hidden_size,) weighs ``output``."""

    norm: ml.Tensor
    router: Linear
    predictions: Linear
    corrections: Linear
    scale: ml.Tensor | None
    streams: int
    active: int
    eps: float

    def predict(self, ctx: ml.Context, hidden: ml.Tensor) -> ml.Tensor:
        """hidden (tokens, streams, hidden_size) -> the same, before the layer."""
        routes = self._routes(ctx, self.active_of(ctx, hidden))
        mix = self.predictions(ctx, routes).reshape(ctx, hidden.shape[0], self.streams, self.streams)
        return mix.matmul(ctx, hidden).add(ctx, hidden)

    def correct(self, ctx: ml.Context, predicted: ml.Tensor, computed: ml.Tensor) -> ml.Tensor:
        """predicted (tokens, streams, hidden_size), computed (tokens, hidden_size) -> as predicted."""
        tokens, size = computed.shape
        share = self.corrections(ctx, self._routes(ctx, computed)).reshape(ctx, tokens, self.streams, 1)
        news = computed.sub(ctx, self.active_of(ctx, predicted)).reshape(ctx, tokens, 1, size)
        return share.mul(ctx, news).add(ctx, predicted)

    def active_of(self, ctx: ml.Context, hidden: ml.Tensor) -> ml.Tensor:
        """hidden (tokens, streams, hidden_size) -> (tokens, hidden_size)."""
        tokens, _, size = hidden.shape
        return hidden.slice(ctx, 1, self.active, self.active + 1).reshape(ctx, tokens, size)

    def output(self, ctx: ml.Context, hidden: ml.Tensor) -> ml.Tensor:
        """``active_of`` hidden, scaled."""
        active = self.active_of(ctx, hidden)
        return active if self.scale is None else active.mul(ctx, self.scale)

    def _routes(self, ctx: ml.Context, x: ml.Tensor) -> ml.Tensor:
        """x (tokens, hidden_size) -> (tokens, streams)."""
        routed = self.router(ctx, x.rms_norm(ctx, self.norm, self.eps))
        return routed.scale(ctx, 1 / x.shape[1]).tanh(ctx)


def load_altup(
    load: Loader, ctx: ml.Context, prefix: str, streams: int, active: int, eps: float, scaled: bool
) -> AltUp:
    """Of the tensors below ``prefix``; not ``scaled``: what a layer gives is not weighed."""
    scale = load.tensor(ctx, f"{prefix}.correct_output_scale")
    ones = load.put(ctx, np.ones(streams, np.float32))
    return AltUp(
        norm=load.norm(ctx, f"{prefix}.router_norm"),
        router=load.linear(ctx, f"{prefix}.modality_router"),
        predictions=load.linear(ctx, f"{prefix}.prediction_coefs"),
        corrections=replace(load.linear(ctx, f"{prefix}.correction_coefs"), bias=ones),
        scale=scale if scaled else None,
        streams=streams,
        active=active,
        eps=eps,
    )


def altup_shapes(prefix: str, hidden: int, streams: int) -> dict[str, Shape]:
    """The tensors that ``load_altup`` reads."""
    return {
        f"{prefix}.correct_output_scale": (hidden,),
        f"{prefix}.correction_coefs.weight": (streams, streams),
        f"{prefix}.prediction_coefs.weight": (streams * streams, streams),
        f"{prefix}.modality_router.weight": (streams, hidden),
        f"{prefix}.router_norm.weight": (hidden,),
    }


def magnitude(ctx: ml.Context, x: ml.Tensor, least: float | None = None) -> ml.Tensor:
    """x (tokens, size) -> F32 (tokens, 1), the root of the mean square, which is at least ``least``."""
    x = x.cast(ctx, ml.DType.F32)
    square = x.mul(ctx, x).mean(ctx, 1, keepdims=True)
    return (square if least is None else square.clamp(ctx, least, None)).sqrt(ctx)


def rescaled(ctx: ml.Context, x: ml.Tensor, target: ml.Tensor) -> ml.Tensor:
    """x (tokens, size) with the magnitude ``target``, F32 (tokens, 1)."""
    share = target.div(ctx, magnitude(ctx, x, _SMALLEST))
    return x.cast(ctx, ml.DType.F32).mul(ctx, share).cast(ctx, x.dtype)
