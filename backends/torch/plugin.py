"""The plugin record of the PyTorch backend."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from ml import Availability, Backend, BackendSpec, DType, hookimpl

MINIMUM = (2, 6)
INSTALL_HINT = "pip install 'ml-kvcache[torch]'"


def probe() -> Availability:
    try:
        import torch
    except ImportError as error:
        return Availability(False, f"torch cannot be imported: {error}")
    version = str(torch.__version__)
    if tuple(map(int, version.split(".")[:2])) < MINIMUM:
        needed = ".".join(map(str, MINIMUM))
        return Availability(False, f"torch {version} is older than {needed}", version)
    from backends.torch.devices import existing_devices

    return Availability(True, version=version, devices=existing_devices())


def open_torch(
    device: Any = None,
    devices: Sequence[Any] | None = None,
    layers: int | Sequence[int] | None = None,
    dtype: DType = DType.F32,
) -> Backend:
    from backends.torch.backend import TorchBackend

    return TorchBackend(device, devices, layers, dtype)


def torchrun(size: int) -> Sequence[str]:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    return [*run, f"--nproc-per-node={size}", "--no-python"]


@hookimpl
def ml_backend() -> BackendSpec:
    return BackendSpec("torch", 50, ("torch",), INSTALL_HINT, probe, open_torch, launcher=torchrun)
