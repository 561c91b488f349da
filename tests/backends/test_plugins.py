"""The records of our own plugins: found without their framework, and clear where it is missing."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import ml

PLUGINS: dict[str, tuple[str, int, str]] = {
    "torch": ("torch", 50, "pip install 'ml-kvcache[torch]'"),
    "mlx": ("mlx.core", 60 if sys.platform == "darwin" else 40, "pip install 'ml-kvcache[mlx]'"),
    "cupy": ("cupy", 30, "pip install 'ml-kvcache[cupy-cuda12x]'  (or cupy-cuda13x)"),
}
"""name -> (the module of its framework, priority, how to install it)."""


def row(name: str) -> ml.BackendInfo:
    return {info.name: info for info in ml.available_backends()}[name]


def test_which_is_opened_where_all_can_run() -> None:
    specs = ml.plugins.registry().specs()
    assert {name: specs[name].priority for name in PLUGINS} == {name: PLUGINS[name][1] for name in PLUGINS}


MODES = """
import torch
import mlx.core as mx
print(torch.get_num_threads(), torch.get_num_interop_threads(), torch.get_default_dtype(),
      torch.get_default_device(), torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
      torch.is_autocast_enabled("cpu"), mx.default_device(), mx.default_stream(mx.default_device()))
"""


def test_a_framework_is_the_same_whether_or_not_backends_were_listed_before_it_was_imported() -> None:
    """The probes of ours import theirs, in threads of their own."""
    for module in ("torch", "mlx.core"):
        pytest.importorskip(module)
    listed = "import sys, ml; ml.available_backends(); assert 'torch' in sys.modules"
    found = {
        subprocess.run([sys.executable, "-c", before + MODES], check=True, capture_output=True).stdout
        for before in ("", listed)
    }
    assert len(found) == 1


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize("name", PLUGINS)
def test_without_its_framework_the_probe_says_why_and_what_to_install(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module, _, hint = PLUGINS[name]
    monkeypatch.setitem(sys.modules, module, None)
    info: Any = row(name)
    assert not info.available
    assert info.reason.startswith(f"{name} cannot be imported: import of {module} halted")
    assert info.install_hint == hint
    with pytest.raises(ml.BackendUnavailableError, match=rf"'{name}' cannot run here: {name} cannot be imp"):
        ml.open_backend(name)


@pytest.mark.parametrize("name", ["numpy", "torch", "mlx"])
def test_the_default_dtype_is_given_by_name_too_and_anything_else_refused(name: str) -> None:
    torch = pytest.importorskip("torch")
    for dtype in ("bf16", "BF16", ml.DType.BF16):
        with ml.open_backend(name, dtype=dtype) as backend, backend.new_context() as ctx:
            assert ctx.from_numpy([1.0]).dtype is ml.DType.BF16
    for wrong in (torch.bfloat16, np.float32, "f99", "i32", ml.DType.I32, None):
        with pytest.raises(ml.DTypeError, match=r"open_backend: dtype=.*must be F32, F16 or BF16"):
            ml.open_backend(name, dtype=wrong)


def test_an_array_of_no_dtype_is_refused_with_what_converts_it(numpy_backend: ml.Backend) -> None:
    with pytest.raises(ml.DTypeError, match="float64 has no DType; convert it with astype"):
        numpy_backend.new_context().from_native(np.ones(2))
