"""The CuPy backend's record, its probe and its options, on a double of CuPy."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

import ml
from backends.cupy import plugin
from ml import DType

from ..rigs.cupy_double import double, fails, module


def row() -> ml.BackendInfo:
    return {info.name: info for info in ml.available_backends()}["cupy"]


NO_DRIVER = "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version"
NO_DEVICE = "cudaErrorNoDevice: no CUDA-capable device is detected"
NO_NVRTC = 'Failure finding "libnvrtc.so.12":\n  No such file'


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"getDeviceCount": fails(NO_DRIVER), "driverGetVersion": lambda: 0},
            f"no CUDA driver ({NO_DRIVER})",
        ),
        (
            {"getDeviceCount": fails(NO_DRIVER), "driverGetVersion": lambda: 11040},
            f"the CUDA driver is too old: it is for 11.4, and CuPy was built with 12.9 ({NO_DRIVER})",
        ),
        ({"getDeviceCount": fails(NO_DEVICE)}, f"no CUDA device ({NO_DEVICE})"),
        ({"getDeviceCount": lambda: 0}, "no CUDA device (cudaGetDeviceCount: 0)"),
        ({"getDeviceCount": fails("cudaErrorUnknown: ?")}, "CUDA cannot be used (cudaErrorUnknown: ?)"),
        (
            {"getDeviceCount": fails("cudaErrorUnknown: ?"), "driverGetVersion": fails("too")},
            "CUDA cannot be used (cudaErrorUnknown: ?)",
        ),
        ({"getVersion": fails(NO_NVRTC)}, "no NVRTC, CUDA's runtime compiler (Failure finding"),
        ({"__version__": "13.6.0"}, "cupy 13.6.0 is older than 14, the first with BF16"),
    ],
)  # fmt: skip
def test_the_probe_says_what_is_missing_in_cudas_own_words(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], reason: str
) -> None:
    for name, found in double.modules().items():
        monkeypatch.setitem(sys.modules, name, found)
    cupy = sys.modules["cupy"]
    for name, value in changes.items():
        owner = {"__version__": cupy, "getVersion": cupy.cuda.nvrtc}.get(name, cupy.cuda.runtime)
        monkeypatch.setattr(owner, name, value)
    found = plugin.probe()
    assert not found.ok
    assert found.reason.startswith(reason)
    assert "\n" not in found.reason
    assert found.version == cupy.__version__


@pytest.mark.usefixtures("unprobed")
def test_the_probe_reports_version_and_devices_and_open_backend_takes_its_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, found in {**double.modules(), "backends.cupy.backend": module}.items():
        monkeypatch.setitem(sys.modules, name, found)
    assert plugin.probe() == ml.Availability(True, version="14.2.0", devices=("cuda:0", "cuda:1"))
    with ml.open_backend("cupy", device="cuda:1", dtype=DType.F16) as backend:
        assert backend.devices[0].name == "cuda:1"
        assert backend.new_context().from_numpy([0.5]).dtype is DType.F16


def test_the_real_cupy_is_imported_and_probed_where_it_is_installed() -> None:
    real = pytest.importorskip("cupy")
    assert row().version == real.__version__
    if not row().available:
        assert "CUDA" in row().reason
        with pytest.raises(ml.BackendUnavailableError, match="CUDA"):
            ml.open_backend("cupy")
    importlib.import_module("backends.cupy.backend")  # on the real one: nothing is asked of a device


# Options.


@pytest.mark.parametrize("device", ["cuda:7", "cpu", "", -1, 2, True, 1.0])
def test_an_absent_device_is_refused_with_those_that_exist(device: Any) -> None:
    with pytest.raises(ml.DeviceError, match=r"cupy has no device .*available: cuda:0, cuda:1"):
        module.CupyBackend(device=device)


@pytest.mark.parametrize(
    ("device", "name"),
    [(None, "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1"), (1, "cuda:1"), (double.Device(1), "cuda:1")],
)
def test_a_device_is_a_name_a_number_or_cupys_own(device: Any, name: str) -> None:
    with module.CupyBackend(device=device) as backend:
        described = f"Double {name[-1]}"
        assert [(d.name, d.kind, d.description) for d in backend.devices] == [(name, "cuda", described)]
        assert backend.new_context().zeros((2,), DType.F32).native.device.id == int(name[-1])


def test_devices_are_named_once_and_said_in_one_way() -> None:
    for options in (
        {"device": 0, "devices": [0]},
        {"devices": []},
        {"devices": "cuda"},
        {"devices": ["cuda", 0], "layers": 2},
    ):  # fmt: skip
        with pytest.raises(ml.DeviceError):
            module.CupyBackend(**options)
    for layers in (None, 0):
        with pytest.raises(ml.ShapeError, match="layers"):
            module.CupyBackend(devices=[0, 1], layers=layers)


def test_a_stream_is_cupys_and_of_that_device() -> None:
    with pytest.raises(ml.DeviceError, match=r"stream='x'; it must be a cupy.cuda.Stream"):
        module.CupyBackend(stream="x")
    with double.Device(1):
        stream = double.Stream()
    with pytest.raises(ml.DeviceError, match=r"a stream of cuda:1 for cuda:0"):
        module.CupyBackend(stream=stream)
    assert module.CupyBackend(device=1, stream=stream).devices[0].name == "cuda:1"
