"""The plugin record of the NumPy backend."""

from __future__ import annotations

from collections.abc import Sequence

from ml import Availability, Backend, BackendSpec, DType, hookimpl


def probe() -> Availability:
    import numpy

    return Availability(True, version=numpy.__version__, devices=("cpu",))


def open_numpy(
    device: str | None = None,
    dtype: DType = DType.F32,
    devices: Sequence[str] | None = None,
    layers: int | None = None,
) -> Backend:
    from backends.numpy.backend import NumpyBackend

    return NumpyBackend(device, dtype, devices, layers)


@hookimpl
def ml_backend() -> BackendSpec:
    return BackendSpec("numpy", 0, ("numpy",), "pip install ml-kvcache", probe, open_numpy)
