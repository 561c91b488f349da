"""One forward pass over the rows of a batch: what each kind of layer keeps, reads and sets aside."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import numpy as np
import torch

from kvcache.integrations.rows.dense_batch import DenseBatch
from kvcache.integrations.transformers.deferred import Deferred
from kvcache.integrations.transformers.kinds import Kind

__all__ = ["ForwardPass", "Pair", "Shown"]

Pair = tuple[torch.Tensor, torch.Tensor]
"""K and V."""


@dataclass(slots=True, eq=False)
class Shown:
    """What the mask of a pass says is no padding."""

    mask: torch.Tensor | None
    """(rows, tokens so far)."""
    rows: np.ndarray | None
    """The same on the host; None: nothing is hidden."""
    served: bool
    """Whether the cache sees as this mask does."""
    blind: np.ndarray | None = None
    """(rows, new tokens): those that see nothing, as padding on the left does; None: there are none."""
    dense: bool = False
    """Whether reading all and hiding some is cheaper than reading what is shown."""


@dataclass(slots=True)
class ForwardPass:
    """One forward pass over positions ``[begin, begin + tokens)`` of every row."""

    begin: int
    tokens: int
    attends: bool = False
    """Whether attention is ours in it, and may read the cache itself."""
    stored: dict[Kind, int] = field(default_factory=dict)
    """How many of the new tokens a kind keeps, where a window keeps not all of them."""
    readings: dict[Kind, DenseBatch] = field(default_factory=dict)
    """What each kind's layers read: the past alone where not all that is new is kept."""
    aside: dict[int, Pair] = field(default_factory=dict)
    """What layers of those kinds saw before the pass, and while passes are recorded what is new: K and V
    that ``cut`` can come back to."""
    given: list[weakref.ref[Deferred]] = field(default_factory=list)
    """K and V that layers got and that are made when something looks into them."""
    masks: dict[Kind, Shown] = field(default_factory=dict)
    """By which mask attention reads each kind."""
    states: dict[tuple[int, str], bool] = field(default_factory=dict)
    """Layers and which of their states have had their share; True: fetched, and not given yet."""
    encoded: dict[int, Pair | None] | None = None
    """Where the pass brings an encoder's output: what layers that have not got it yet had before."""
