"""The shipped cache suite on our PyTorch backend, used exactly as a third party uses it."""

import pytest

from kvcache.testing import CacheTests

pytest.importorskip("torch")


class TestTorch(CacheTests):
    backend_name = "torch"
    traces = 100
    state_traces = 16
    encoder_traces = 16
    quantized_traces = 8
    fault_stride = 3
    long_run = 2000
