"""The plugin record of the PaddlePaddle backend; nothing here imports Paddle before it is asked to."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from ml import Availability, Backend, BackendSpec, hookimpl

__all__ = ["ml_backend"]


def probe() -> Availability:
    """Imports nothing: Paddle that is first imported in a thread is in static mode in all others."""
    if find_spec("paddle") is None:
        return Availability(False, "paddle is not installed")
    return Availability(True, version=version("paddlepaddle"), devices=("cpu",))


def open_paddle(**options: Any) -> Backend:
    from ml_backend_paddle.backend import PaddleBackend

    return PaddleBackend(**options)


@hookimpl
def ml_backend() -> BackendSpec:
    return BackendSpec("paddle", -10, ("paddle",), "pip install ml-backend-paddle", probe, open_paddle)
