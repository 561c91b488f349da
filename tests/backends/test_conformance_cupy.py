"""The shipped suite on our CuPy backend, used as the author of a plugin uses it; it needs a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ml
from backends.cupy.plugin import probe
from ml import DType
from ml.testing import BackendTests

if not (found := probe()).ok:
    pytest.skip(f"cupy cannot run here: {found.reason}", allow_module_level=True)


class TestCupy(BackendTests):
    backend_name = "cupy"


@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16, DType.I32])
def test_torch_and_cupy_share_memory_by_dlpack_both_ways(dtype: DType) -> None:
    torch: Any = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA here")
    import cupy

    with ml.open_backend("cupy") as backend, backend.new_context() as ctx:
        ours: Any = ctx.full((2, 3), 1, dtype)
        theirs = torch.from_dlpack(ours)
        theirs[0, 1] = 5
        torch.cuda.synchronize()
        assert ours.to_numpy()[0, 1] == 5
        back = ctx.from_native(cupy.from_dlpack(theirs))
        ctx.full((2, 3), 7, dtype).copy(ctx, back)
        assert ours.to_numpy().astype(np.float32).tolist() == [[7.0] * 3] * 2
