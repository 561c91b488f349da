"""The shipped cache suite on our NumPy backend, used exactly as a stranger uses it."""

from kvcache.testing import CacheTests


class TestNumpy(CacheTests):
    backend_name = "numpy"
    traces = 2000
    examples = 100
