"""The shipped suite on our PyTorch backend, used exactly as a stranger uses it."""

import pytest

from ml.testing import BackendTests

pytest.importorskip("torch")


class TestTorch(BackendTests):
    backend_name = "torch"
