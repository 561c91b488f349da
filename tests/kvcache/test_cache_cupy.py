"""The shipped cache suite on our CuPy backend, used exactly as a third party uses it; it needs a GPU."""

import pytest

from backends.cupy.plugin import probe
from kvcache.testing import CacheTests

if not (found := probe()).ok:
    pytest.skip(f"cupy cannot run here: {found.reason}", allow_module_level=True)


class TestCupy(CacheTests):
    backend_name = "cupy"
    traces = 60
    long_run = 2000
