"""What ``kvcache bench`` measures, and how: short calls timed in turn on a machine that others share.

``interleave`` runs each ``Contender`` once per round, so that other load affects all of them equally, and
drops rounds in which the process was preempted. ``Decoding`` is a sequence that decodes through a cache, and
``measure`` what the command prints.
"""

from kvcache.testing.bench.decoding import DIM, HEADS, LAYERS, ROOM, Decoding, floors_for, measure, shown
from kvcache.testing.bench.timing import Contender, Round, Sample, Trial, interleave

__all__ = [
    "DIM", "HEADS", "LAYERS", "ROOM", "Contender", "Decoding", "Round", "Sample", "Trial", "floors_for",
    "interleave", "measure", "shown",
]  # fmt: skip
