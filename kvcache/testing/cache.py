"""The whole suite as one class."""

from __future__ import annotations

from kvcache.testing.answers import AnswerTests
from kvcache.testing.attending import AttendingTests
from kvcache.testing.batches import BatchTests
from kvcache.testing.capacity import CapacityTests
from kvcache.testing.composed import EncoderSnapshotTests, WrapperSnapshotTests
from kvcache.testing.defrag import DefragTests
from kvcache.testing.encoder import EncoderTests
from kvcache.testing.faults import FaultTests
from kvcache.testing.lazy import LazySnapshotTests
from kvcache.testing.lazy_states import LazyStateTests
from kvcache.testing.masks import MaskTests
from kvcache.testing.order import OrderTests
from kvcache.testing.properties import PropertyTests
from kvcache.testing.quantized import QuantizedTests
from kvcache.testing.reading import ReadingTests
from kvcache.testing.recurrent import RecurrentFaultTests, RecurrentTests
from kvcache.testing.removal import RemovalTests
from kvcache.testing.reserving import ReservingTests
from kvcache.testing.scheduled import ScheduledSnapshotTests, ScheduledStateTests
from kvcache.testing.sharing import SharingTests
from kvcache.testing.snapshots import SnapshotTests
from kvcache.testing.storing import StoringTests
from kvcache.testing.windows import WindowTests
from kvcache.testing.wrapper import WrapperTests

__all__ = ["CacheTests"]


class CacheTests(
    BatchTests,
    MaskTests,
    StoringTests,
    SharingTests,
    RemovalTests,
    DefragTests,
    ReservingTests,
    ReadingTests,
    CapacityTests,
    WindowTests,
    OrderTests,
    AttendingTests,
    FaultTests,
    PropertyTests,
    QuantizedTests,
    SnapshotTests,
    LazySnapshotTests,
    LazyStateTests,
    ScheduledSnapshotTests,
    EncoderTests,
    EncoderSnapshotTests,
    WrapperTests,
    WrapperSnapshotTests,
    RecurrentTests,
    RecurrentFaultTests,
    ScheduledStateTests,
    AnswerTests,
):
    """Everything the contract says of the attention caches. Subclass it; see :mod:`kvcache.testing`.

    ``traces``, ``examples`` and ``long_run`` say how much of what is random or long is run.
    """
