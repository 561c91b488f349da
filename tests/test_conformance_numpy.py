"""The shipped suite on our NumPy backend, used exactly as a stranger uses it."""

from ml.testing import BackendTests


class TestNumpy(BackendTests):
    backend_name = "numpy"
