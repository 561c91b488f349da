"""The shipped cache suite on our PyTorch backend, used exactly as a stranger uses it."""

import pytest

from kvcache.testing import CacheTests

pytest.importorskip("torch")


class TestTorch(CacheTests):
    backend_name = "torch"
    traces = 200
    examples = 15
    state_traces = 24
    encoder_traces = 24
    fault_stride = 3
    wrapper_traces = 12
    quantized_traces = 8
