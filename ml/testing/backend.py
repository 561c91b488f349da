"""The whole suite as one class."""

from __future__ import annotations

from ml.testing.creation import CreationTests
from ml.testing.movement import MovementTests

__all__ = ["BackendTests"]


class BackendTests(CreationTests, MovementTests):
    """Everything the contract says of a backend. Subclass it; see :mod:`ml.testing`."""
