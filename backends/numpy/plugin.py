"""The plugin record of the NumPy backend."""

from __future__ import annotations

from typing import Any

from ml import Availability, Backend, BackendSpec, hookimpl


def probe() -> Availability:
    import numpy

    return Availability(True, version=numpy.__version__, devices=("cpu",))


def open_numpy(**options: Any) -> Backend:
    from backends.numpy.backend import NumpyBackend

    return NumpyBackend(**options)


@hookimpl
def ml_backend() -> BackendSpec:
    return BackendSpec("numpy", 0, ("numpy",), "pip install ml-kvcache", probe, open_numpy)
