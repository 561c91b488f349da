"""The whole suite as one class."""

from __future__ import annotations

from ml.testing.aliasing import AliasingTests
from ml.testing.attention import AttentionTests
from ml.testing.casts import CastTests
from ml.testing.compute import ComputeTests
from ml.testing.copies import CopyTests
from ml.testing.creation import CreationTests
from ml.testing.groups import GroupTests
from ml.testing.movement import MovementTests
from ml.testing.optional import CapabilityTests
from ml.testing.order import OrderTests
from ml.testing.quantized import QuantizedTests
from ml.testing.random_views import RandomViewTests
from ml.testing.refusals import RefusalTests
from ml.testing.rows import RowTests
from ml.testing.special import SpecialValueTests
from ml.testing.stores import KVStoreTests
from ml.testing.transfers import PageTransferTests


class BackendTests(
    CreationTests,
    MovementTests,
    AliasingTests,
    RandomViewTests,
    CopyTests,
    RowTests,
    CastTests,
    ComputeTests,
    SpecialValueTests,
    OrderTests,
    RefusalTests,
    AttentionTests,
    QuantizedTests,
    CapabilityTests,
    KVStoreTests,
    PageTransferTests,
    GroupTests,
):
    """Everything the contract requires of a backend. Subclass it; see ``ml.testing``."""
