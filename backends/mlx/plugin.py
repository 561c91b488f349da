"""The plugin record of the MLX backend; nothing here imports MLX before it is asked to."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

from ml import Availability, Backend, BackendSpec, hookimpl

__all__ = ["ml_backend"]


def probe() -> Availability:
    try:
        import mlx.core as mx
    except ImportError as error:
        return Availability(False, f"mlx cannot be imported: {error}")
    devices = ("gpu", "cpu") if mx.is_available(mx.gpu) else ("cpu",)
    return Availability(True, version=version("mlx"), devices=devices)


def open_mlx(**options: Any) -> Backend:
    from backends.mlx.backend import MlxBackend

    return MlxBackend(**options)


@hookimpl
def ml_backend() -> BackendSpec:
    """On a Mac it is what runs fastest; elsewhere PyTorch goes first."""
    priority = 60 if sys.platform == "darwin" else 40
    return BackendSpec("mlx", priority, ("mlx",), "pip install 'ml-kvcache[mlx]'", probe, open_mlx)
