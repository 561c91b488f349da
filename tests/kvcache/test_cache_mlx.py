"""The shipped cache suite on our MLX backend, used exactly as a third party uses it."""

import pytest

from kvcache.testing import CacheTests

pytest.importorskip("mlx")


class TestMlx(CacheTests):
    backend_name = "mlx"
    colours = (3,)
    traces = 40
    state_traces = 8
    encoder_traces = 8
    quantized_traces = 4
    fault_stride = 7
    long_run = 500
