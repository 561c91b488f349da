"""The plugin record of the MLX backend; MLX is imported only by ``probe`` and ``open``."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from ml import Availability, Backend, BackendSpec, DType, hookimpl
from ml.distributed import free_ports


def probe() -> Availability:
    try:
        import mlx.core as mx
    except ImportError as error:
        return Availability(False, f"mlx cannot be imported: {error}")
    devices = ("gpu", "cpu") if mx.is_available(mx.gpu) else ("cpu",)
    return Availability(True, version=version("mlx"), devices=devices)


def open_mlx(
    device: str | None = None,
    dtype: DType = DType.F32,
    devices: Sequence[str] | None = None,
    layers: int | None = None,
) -> Backend:
    from backends.mlx.backend import MlxBackend

    return MlxBackend(device, dtype, devices, layers)


def mlx_launch(size: int) -> Sequence[str]:
    """The launcher with free ports, since mlx.launch always uses the same ones."""
    beside = shutil.which("mlx.launch", path=str(Path(sys.executable).parent))
    port = free_ports(size)[0]
    return [beside or "mlx.launch", f"--repeat-hosts={size}", f"--starting-port={port}", "--"]


@hookimpl
def ml_backend() -> BackendSpec:
    """MLX is the fastest backend on a Mac; elsewhere PyTorch has priority."""
    priority = 60 if sys.platform == "darwin" else 40
    hint = "pip install 'ml-kvcache[mlx]'"
    return BackendSpec("mlx", priority, ("mlx",), hint, probe, open_mlx, launcher=mlx_launch)
