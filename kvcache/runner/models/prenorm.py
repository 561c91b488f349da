"""Layers of which either part reads a norm of what it is given, and adds to that::

hidden += mixed(norm(hidden))        attention, a recurrence: what families say
hidden += mlp(mlp_norm(hidden))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml
from kvcache.runner.models.decoder import Step
from kvcache.runner.weights import Loader

__all__ = ["PreNormLayer", "load_norms", "norm_shapes"]

_NORMS = ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True, slots=True)
class PreNormLayer:
    """A decoder's ``Layer``; ``norms`` are RMS norms, the one before ``mlp`` last."""

    eps: float
    norms: tuple[ml.Tensor, ml.Tensor]
    mlp: Callable[[ml.Context, ml.Tensor], ml.Tensor]

    def mix(self, ctx: ml.Context, hidden: ml.Tensor, step: Step) -> ml.Tensor:
        return hidden.add(ctx, self._mixed(ctx, hidden.rms_norm(ctx, self.norms[0], self.eps), step))

    def feed(self, ctx: ml.Context, hidden: ml.Tensor) -> ml.Tensor:
        return hidden.add(ctx, self.mlp(ctx, hidden.rms_norm(ctx, self.norms[1], self.eps)))

    def _mixed(self, ctx: ml.Context, normed: ml.Tensor, step: Step) -> ml.Tensor:
        """What is added to hidden (tokens, hidden_size), of its norm."""
        raise NotImplementedError


def load_norms(
    load: Loader, ctx: ml.Context, prefix: str, offset: float = 0.0
) -> tuple[ml.Tensor, ml.Tensor]:
    """Both norms of the layer ``prefix``, as Llama names them; ``offset`` is added to what is stored."""
    norm, mlp_norm = (load.norm(ctx, f"{prefix}.{name}", offset) for name in _NORMS)
    return norm, mlp_norm


def norm_shapes(hidden: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer that ``load_norms`` reads."""
    return {f"{name}.weight": (hidden,) for name in _NORMS}
