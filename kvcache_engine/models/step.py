"""The data shared by the layers of a forward pass, and the interface of a layer, mostly two parts after
norms::

hidden += mixer(norm(hidden))        attention, a recurrence
hidden += mlp(mlp_norm(hidden))      Gemma also normalises the output of each part
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import ml
from kvcache.cache import Batch
from kvcache_engine.weights import Loader
from ml import nn

__all__ = ["MLP", "NORMS", "ROPE", "Layer", "Mixer", "PreNormLayer", "Step", "load_norms", "norm_shapes"]

ROPE = "rope"
"""The name of the rotation of models with one rotation for all layers."""


@dataclass(slots=True)
class Step:
    """One forward pass, as seen by its layers. ``rotations`` are created once for the layer types of a model;
    ``tensors`` and, on the host, ``plans`` are anything else that a family computes once for all layers.
    """

    batch: Batch
    cache: Any
    rotations: dict[str, nn.Rotation] = field(default_factory=dict)
    tensors: dict[str, ml.Tensor] = field(default_factory=dict)
    plans: dict[str, Any] = field(default_factory=dict)

    def to(self, ctx: ml.Context) -> Self:
        """The same step with its tensors on the device of ``ctx``."""
        return dataclasses.replace(
            self,
            rotations={name: rotation.to(ctx) for name, rotation in self.rotations.items()},
            tensors={name: tensor.cast(ctx, tensor.dtype) for name, tensor in self.tensors.items()},
        )


class Layer(Protocol):
    def mix(self, ctx: ml.Context, hidden: ml.Tensor, step: Step) -> ml.Tensor:
        """hidden (tokens, hidden_size) -> the same shape, with the residual added."""

    def feed(self, ctx: ml.Context, hidden: ml.Tensor) -> ml.Tensor:
        """hidden (tokens, hidden_size) -> the same shape, with the residual added; there may be fewer
        tokens.
        """


NORMS = ("input_layernorm", "post_attention_layernorm")
Mixer = Callable[[ml.Context, ml.Tensor, Step], ml.Tensor]
MLP = Callable[[ml.Context, ml.Tensor], ml.Tensor]
Norms = tuple[ml.Tensor, ml.Tensor]
"""RMS norms of a layer's two parts."""


@dataclass(frozen=True, slots=True)
class PreNormLayer:
    """A decoder's ``Layer``; ``norms`` precede its parts, ``after`` follow them.

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
    """Both norms of the layer ``prefix``, with Llama's names; ``offset`` is added to the stored weights."""
    norm, mlp_norm = (load.norm(ctx, f"{prefix}.{name}", offset) for name in names)
    return norm, mlp_norm


def norm_shapes(hidden: int, names: tuple[str, ...] = NORMS) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer that ``load_norms`` reads."""
    return {f"{name}.weight": (hidden,) for name in names}
