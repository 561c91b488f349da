"""The plugin record of the MLX backend; nothing here imports MLX before it is asked to."""

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
    """On ports of its own: mlx.launch takes the same ones each time."""
    beside = shutil.which("mlx.launch", path=str(Path(sys.executable).parent))
    port = free_ports(size)[0]
    return [beside or "mlx.launch", f"--repeat-hosts={size}", f"--starting-port={port}", "--"]


@hookimpl
def ml_backend() -> BackendSpec:
    """On a Mac it is what runs fastest; elsewhere PyTorch goes first."""
    priority = 60 if sys.platform == "darwin" else 40
    hint = "pip install 'ml-kvcache[mlx]'"
    return BackendSpec("mlx", priority, ("mlx",), hint, probe, open_mlx, launcher=mlx_launch)
