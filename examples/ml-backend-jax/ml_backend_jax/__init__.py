"""The plugin record of the JAX backend; nothing here imports JAX before it is asked to."""

from __future__ import annotations

from typing import Any

from ml import Availability, Backend, BackendSpec, hookimpl

__all__ = ["ml_backend"]


def probe() -> Availability:
    try:
        import jax
    except ImportError as error:
        return Availability(False, f"jax cannot be imported: {error}")
    devices = tuple(dict.fromkeys(device.platform for device in jax.devices()))
    return Availability(True, version=jax.__version__, devices=devices)


def open_jax(**options: Any) -> Backend:
    from ml_backend_jax.backend import JaxBackend

    return JaxBackend(**options)


@hookimpl
def ml_backend() -> BackendSpec:
    return BackendSpec("jax", 20, ("jax",), "pip install ml-backend-jax", probe, open_jax)
