"""The whole suite as one class."""

from __future__ import annotations

from kvcache.testing.faults import FaultTests
from kvcache.testing.storing import StoringTests
from kvcache.testing.suites.attending import AttendingTests
from kvcache.testing.suites.encoder import EncoderTests
from kvcache.testing.suites.extras import ExtrasTests
from kvcache.testing.suites.masks import MaskTests
from kvcache.testing.suites.moving import MovingTests
from kvcache.testing.suites.properties import PropertyTests
from kvcache.testing.suites.quantized import QuantizedTests
from kvcache.testing.suites.reading import ReadingTests
from kvcache.testing.suites.recurrent import RecurrentTests
from kvcache.testing.suites.snapshots import SnapshotTests


class CacheTests(
    MaskTests,
    StoringTests,
    MovingTests,
    ReadingTests,
    AttendingTests,
    ExtrasTests,
    FaultTests,
    PropertyTests,
    QuantizedTests,
    SnapshotTests,
    EncoderTests,
    RecurrentTests,
):
    """All cache tests that depend on the backend. Subclass it; see ``kvcache.testing``.

    ``traces``, ``quantized_traces``, ``state_traces``, ``encoder_traces`` and ``long_run`` control the amount
    of random and long tests.
    """
