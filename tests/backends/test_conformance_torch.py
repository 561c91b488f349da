"""The shipped suite on our PyTorch backend, used as the author of a plugin uses it."""

import pytest

from ml.testing import BackendTests

pytest.importorskip("torch")


class TestTorch(BackendTests):
    backend_name = "torch"
