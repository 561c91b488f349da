"""The plugin record of the CuPy backend, and its probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ml import Availability, Backend, BackendSpec, DType, hookimpl

MINIMUM = 14
"""The first release with BF16."""
INSTALL_HINT = "pip install 'ml-kvcache[cupy-cuda12x]'  (or cupy-cuda13x)"


def probe() -> Availability:
    try:
        import cupy
    except ImportError as error:
        return Availability(False, f"cupy cannot be imported: {_one_line(error)}")
    version = str(cupy.__version__)
    if int(version.split(".")[0]) < MINIMUM:
        return Availability(False, f"cupy {version} is older than {MINIMUM}, the first with BF16", version)
    reason = _missing(cupy)
    if reason:
        return Availability(False, reason, version)
    count = cupy.cuda.runtime.getDeviceCount()
    return Availability(True, version=version, devices=tuple(f"cuda:{i}" for i in range(count)))


def _missing(cupy: Any) -> str:
    """What CuPy lacks here, with CUDA's own message; empty if nothing."""
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except Exception as error:
        return f"{_kind(runtime, error)} ({_one_line(error)})"
    if not count:
        return "no CUDA device (cudaGetDeviceCount: 0)"
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except Exception as error:  # the wheels contain no compiler, but every kernel is compiled on first use
        return (
            f"no NVRTC, CUDA's runtime compiler ({_one_line(error)}); "
            "install the CUDA toolkit, or pip install 'cupy-cuda12x[ctk]'"
        )
    return ""


def _kind(runtime: Any, error: Exception) -> str:
    if "NoDevice" in str(error):
        return "no CUDA device"
    try:
        driver, needed = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    except Exception:
        return "CUDA cannot be used"
    if not driver:
        return "no CUDA driver"
    if "InsufficientDriver" in str(error):
        return (
            f"the CUDA driver is too old: it is for {_cuda(driver)}, and CuPy was built with {_cuda(needed)}"
        )
    return "CUDA cannot be used"


def _cuda(number: int) -> str:
    """CUDA's version 12090 as "12.9"."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _one_line(error: BaseException) -> str:
    """The first line of a message; CuPy frames longer ones with rules and blank lines."""
    return " ".join(str(error).replace("=" * 16, "").split()) or type(error).__name__


def open_cupy(
    device: Any = None,
    devices: Sequence[Any] | None = None,
    layers: int | Sequence[int] | None = None,
    dtype: DType = DType.F32,
    stream: Any = None,
) -> Backend:
    from backends.cupy.backend import CupyBackend

    return CupyBackend(device, devices, layers, dtype, stream)


@hookimpl
def ml_backend() -> BackendSpec:
    return BackendSpec("cupy", 30, ("cupy",), INSTALL_HINT, probe, open_cupy)
