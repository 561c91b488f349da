"""The shipped suite on our NumPy backend, used as the author of a plugin uses it."""

from ml.testing import BackendTests


class TestNumpy(BackendTests):
    backend_name = "numpy"
