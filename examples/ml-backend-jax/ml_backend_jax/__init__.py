"""The plugin record of the JAX backend; nothing here imports JAX before it is asked to."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from ml import Availability, Backend, BackendSpec, hookimpl

__all__ = ["ml_backend"]


def probe() -> Availability:
    """Imports nothing: asking JAX for its devices would start XLA, whose flags count only before that."""
    if find_spec("jax") is None:
        return Availability(False, "jax is not installed")
    return Availability(True, version=version("jax"))


def open_jax(**options: Any) -> Backend:
    from ml_backend_jax.backend import JaxBackend

    return JaxBackend(**options)


@hookimpl
def ml_backend() -> BackendSpec:
    return BackendSpec("jax", 20, ("jax",), "pip install ml-backend-jax", probe, open_jax)
