"""What all measurements share: 8 KV heads of 128, the lengths, the dtypes."""

from __future__ import annotations

import ml
from kvcache.testing.bench.decoding import DIM, HEADS, LAYERS, ROOM

__all__ = ["DIM", "DTYPES", "GROUPS", "HEADS", "LAYERS", "LENGTHS", "ROOM", "WINDOW"]

GROUPS = 4
"""Query heads per KV head."""
LENGTHS = (128, 1024, 8192, 32768)
WINDOW = 1024
DTYPES = {"float32": ml.DType.F32, "bfloat16": ml.DType.BF16}
