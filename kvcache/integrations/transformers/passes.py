"""One forward pass over the rows of a batch: what each kind of layer stores, reads and sets aside."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import numpy as np
import torch

from kvcache import DenseBatch
from kvcache.integrations.transformers.deferred import Deferred
from kvcache.integrations.transformers.kinds import Kind

__all__ = ["ForwardPass", "Pair", "Shown"]

Pair = tuple[torch.Tensor, torch.Tensor]
"""K and V."""


@dataclass(slots=True, eq=False)
class Shown:
    """The tokens of a pass that are not padding according to its mask."""

    mask: torch.Tensor | None
    """(rows, tokens so far)."""
    rows: np.ndarray | None
    """``mask`` on the host; None: nothing is hidden."""
    served: bool
    """Whether the cache applies the same mask."""
    blind: np.ndarray | None = None
    """(rows, new tokens): queries that see nothing, such as left padding; None: there are none."""
    dense: bool = False
    """Whether reading everything with a mask is cheaper than reading only visible tokens."""


@dataclass(slots=True)
class ForwardPass:
    """One forward pass over positions ``[begin, begin + tokens)`` of every row."""

    begin: int
    tokens: int
    attends: bool = False
    """Whether our caches compute attention in this pass."""
    stored: dict[Kind, int] = field(default_factory=dict)
    """By kind, the number of new tokens kept, if a window does not keep all of them."""
    readings: dict[Kind, DenseBatch] = field(default_factory=dict)
    """By kind, what its layers read: only earlier tokens if not all new ones are kept."""
    aside: dict[int, Pair] = field(default_factory=dict)
    """K and V that ``cut`` can restore: what layers of those kinds saw before the pass, and the new tokens
    while passes are recorded.
    """
    deferred: list[weakref.ref[Deferred]] = field(default_factory=list)
    """Deferred K and V returned to layers."""
    masks: dict[Kind, Shown] = field(default_factory=dict)
    """By kind, the mask of attention."""
    states: dict[tuple[int, str], bool] = field(default_factory=dict)
    """By layer and state: present once it took part in the pass; True: fetched but not yet updated."""
    encoded: dict[int, Pair | None] | None = None
    """If the pass brings an encoder's output: the previous output of layers that have not received it yet."""
