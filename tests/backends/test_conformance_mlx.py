"""The shipped suite on our MLX backend, used as the author of a plugin uses it."""

from __future__ import annotations

import pytest

from ml.testing import BackendTests
from ml.testing.aliasing import AliasingTests
from ml.testing.copies import CopyTests
from ml.testing.order import OrderTests
from ml.testing.rows import RowTests

pytest.importorskip("mlx.core")


class TestMlx(BackendTests):
    backend_name = "mlx"


class TestMlxAsLargeBoxes(AliasingTests, CopyTests, OrderTests, RowTests):
    """The paths of large storages (waits, scatters) on the suite's small ones."""

    backend_name = "mlx"

    @pytest.fixture(autouse=True)
    def _no_thresholds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("backends.mlx.storage.WAIT_BYTES", 0)
        monkeypatch.setattr("backends.mlx.tensor.WAIT_BYTES", 0)
        monkeypatch.setattr("backends.mlx.tensor.RUNS_LIMIT", 0)
        monkeypatch.setattr("backends.mlx.work.PENDING_RESULTS", 3)
