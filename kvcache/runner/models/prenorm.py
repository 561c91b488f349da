"""Layers of which either part reads a norm of what it is given, and adds to that::

hidden += mixer(norm(hidden))        attention, a recurrence
hidden += mlp(mlp_norm(hidden))      Gemma normalises what either part gives once more
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml
from kvcache.runner.models.attention import attention_shapes, load_attention
from kvcache.runner.models.decoder import C, CausalModel, Layer, Step
from kvcache.runner.models.feedforward import load_mlp, mlp_shapes
from kvcache.runner.weights import Loader, Shape

__all__ = ["PreNormLayer", "PreNormModel", "load_norms", "norm_shapes"]

NORMS = ("input_layernorm", "post_attention_layernorm")
Mixer = Callable[[ml.Context, ml.Tensor, Step], ml.Tensor]
MLP = Callable[[ml.Context, ml.Tensor], ml.Tensor]
Norms = tuple[ml.Tensor, ml.Tensor]
"""RMS norms of a layer's two parts."""


@dataclass(frozen=True, slots=True)
class PreNormLayer:
    """A decoder's ``Layer``; ``norms`` come before its parts, ``after`` behind them.

    ``cache_kind``: the type of the layer in a WrapperCache.
    """

    eps: float
    norms: Norms
    mixer: Mixer
    mlp: MLP
    cache_kind: int | None = None
    after: Norms | None = None

    def mix(self, ctx: ml.Context, hidden: ml.Tensor, step: Step) -> ml.Tensor:
        if self.cache_kind is not None:
            step.cache.set_layer_type(self.cache_kind)
        mixed = self.mixer(ctx, hidden.rms_norm(ctx, self.norms[0], self.eps), step)
        if self.after is not None:
            mixed = mixed.rms_norm(ctx, self.after[0], self.eps)
        return hidden.add(ctx, mixed)

    def feed(self, ctx: ml.Context, hidden: ml.Tensor) -> ml.Tensor:
        fed = self.mlp(ctx, hidden.rms_norm(ctx, self.norms[1], self.eps))
        if self.after is not None:
            fed = fed.rms_norm(ctx, self.after[1], self.eps)
        return hidden.add(ctx, fed)


def load_norms(
    load: Loader, ctx: ml.Context, prefix: str, offset: float = 0.0, names: tuple[str, str] = NORMS
) -> Norms:
    """Both norms of the layer ``prefix``, named as Llama does; ``offset`` is added to what is stored."""
    norm, mlp_norm = (load.norm(ctx, f"{prefix}.{name}", offset) for name in names)
    return norm, mlp_norm


def norm_shapes(hidden: int, names: tuple[str, ...] = NORMS) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer that ``load_norms`` reads."""
    return {f"{name}.weight": (hidden,) for name in names}


class PreNormModel(CausalModel[C]):
    """A decoder of such layers, which are as Llama's where a family does not say what they are."""

    norm_names = NORMS
    after_names: tuple[str, str] | None = None

    @classmethod
    def layer_shapes(cls, config: Any, i: int) -> dict[str, Shape]:
        norms = norm_shapes(config.hidden_size, cls.norm_names + (cls.after_names or ()))
        return norms | cls.mixer_shapes(config, i) | cls.mlp_shapes(config, i)

    @classmethod
    def mixer_shapes(cls, config: Any, i: int) -> dict[str, Shape]:
        """The tensors that ``mixer`` reads."""
        return attention_shapes(config)

    @classmethod
    def mlp_shapes(cls, config: Any, i: int) -> dict[str, Shape]:
        """The tensors that ``mlp`` reads."""
        return mlp_shapes("mlp", config.hidden_size, config.intermediate_size, config.mlp_bias)

    def mixer(self, load: Loader, ctx: ml.Context, prefix: str, i: int) -> Mixer:
        """That of layer i, of the tensors below ``prefix``."""
        return load_attention(load, ctx, f"{prefix}.self_attn", self.config)

    def mlp(self, load: Loader, ctx: ml.Context, prefix: str, i: int) -> MLP:
        """That of layer i, of the tensors below ``prefix``."""
        return load_mlp(load, ctx, f"{prefix}.mlp")

    def _layer(self, load: Loader, ctx: ml.Context, i: int) -> Layer:
        prefix, offset, after = f"{self.names.layers}.{i}", self.norm_offset, self.after_names
        return PreNormLayer(
            eps=self.config.rms_norm_eps,
            norms=load_norms(load, ctx, prefix, offset, self.norm_names),
            mixer=self.mixer(load, ctx, prefix, i),
            mlp=self.mlp(load, ctx, prefix, i),
            cache_kind=self.config.cache_kind(i),
            after=None if after is None else load_norms(load, ctx, prefix, offset, after),
        )
