"""The parameters of the storage formats of ``ml.SupportsKVStorage``, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

AFFINE: Final[Mapping[str, tuple[int, int]]] = {
    f"AFFINE{bits}_{group}": (bits, group) for bits in (8, 4) for group in (32, 64, 128)
}
"""The bits of a code, and how many values along the last axis share a scale and a bias."""
AFFINE_LEAST_STEP: Final = 1e-7
"""The smallest step between neighbouring codes of a group, before its edge is made exact."""
F8_LARGEST: Final = 448.0
"""The largest number of E4M3."""
F8_LEAST_SCALE: Final = 2.0**-126
"""Smaller scales count as 0, as not every device supports subnormal numbers."""
