"""What the layers of one forward pass share, and what a layer is."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import ml
from kvcache.cache import Batch
from ml import nn

__all__ = ["ROPE", "Layer", "Step"]

ROPE = "rope"
"""The rotation of models that have one for all layers."""


@dataclass(slots=True)
class Step:
    """One forward pass as its layers see it.

    ``rotations`` are made once, for the layer types of a model; ``tensors`` and, on the host, ``plans``
    are whatever else a family computes once for all layers.
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
        """hidden (tokens, hidden_size) -> the same, the residual added."""

    def feed(self, ctx: ml.Context, hidden: ml.Tensor) -> ml.Tensor:
        """hidden (tokens, hidden_size) -> the same, the residual added; tokens may be fewer."""
