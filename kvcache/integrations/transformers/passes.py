"""One forward pass over the rows of a batch: what each kind of layer keeps, reads and sets aside."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvcache.attention.dense_batch import DenseBatch
from kvcache.integrations.transformers.kinds import Kind

__all__ = ["ForwardPass", "Pair"]

Pair = tuple[torch.Tensor, torch.Tensor]
"""K and V."""


@dataclass(slots=True)
class ForwardPass:
    """One forward pass over positions ``[begin, begin + tokens)`` of every row."""

    begin: int
    tokens: int
    stored: dict[Kind, int] = field(default_factory=dict)
    """How many of the new tokens a kind keeps, where a window keeps not all of them."""
    readings: dict[Kind, DenseBatch] = field(default_factory=dict)
    """What each kind's layers read: the past alone where not all that is new is kept."""
    aside: dict[int, Pair] = field(default_factory=dict)
    """What layers of those kinds saw before the pass, and while passes are recorded what is new: K and V
    that ``cut`` can come back to."""
    states: dict[tuple[int, str], bool] = field(default_factory=dict)
    """Layers and which of their states have had their share; True: fetched, and not given yet."""
    encoded: dict[int, Pair | None] | None = None
    """Where the pass brings an encoder's output: what layers that have not got it yet had before."""
