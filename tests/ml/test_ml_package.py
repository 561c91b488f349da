"""What ``import ml`` brings and what it does not; names, errors, dtypes, and the house rules of paths."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ml
import ml.errors
from ml.dtypes import DType

FRAMEWORKS = ("torch", "mlx", "cupy", "jax", "transformers", "mlx_lm", "pytest", "hypothesis", "gguf")
ROOT = Path(__file__).resolve().parents[2]


def imported(imports: str) -> set[str]:
    """Top-level modules that this brings beside NumPy and ml_dtypes, in a fresh process."""
    before = "import sys, numpy, ml_dtypes; before = set(sys.modules)"
    names = "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    line = [sys.executable, "-c", f"{before}\n{imports}\n{names}"]
    done = subprocess.run(line, capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


@pytest.fixture(scope="module")
def brought() -> set[str]:
    return imported("import ml")


def test_the_packages_are_typed() -> None:
    for package in ("ml", "kvcache", "kvcache_engine", "backends"):
        (folder,) = importlib.import_module(package).__path__
        assert (Path(folder) / "py.typed").exists()


def test_import_ml_brings_pluggy_and_quick_parts_of_the_standard_library(brought: set[str]) -> None:
    """The import time is what these cost; a figure in seconds would only measure the machine."""
    assert brought - sys.stdlib_module_names == {"ml", "ml_kvcache", "pluggy"}
    slow = {"asyncio", "unittest", "multiprocessing", "sqlite3", "tkinter", "xml", "http", "ssl"}
    assert not brought & slow


def test_layers_listing_the_specs_and_opening_numpy_import_no_framework() -> None:
    code = "from ml.plugins import registry; registry().specs()\nimport ml, ml.nn; ml.open_backend('numpy')"
    assert not imported(code) & set(FRAMEWORKS)


# Names.


def modules() -> list[str]:
    found = [ml, *(importlib.import_module(f"ml.{name}") for name in ("base", "nn", "testing"))]
    return sorted(
        {
            f"{package.__name__}.{info.name}"
            for package in found
            for info in pkgutil.iter_modules(package.__path__)
        }
        - {"ml.testing.test_backend"}
    )


@pytest.mark.parametrize("name", ["ml", *modules()])
def test_every_module_says_what_it_is_for_and_names_in_all_exist_once(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    names = getattr(module, "__all__", [])
    assert len(set(names)) == len(names)
    for public in names:
        assert hasattr(module, public), public


def test_all_of_ml_is_what_it_binds() -> None:
    submodules = {name.split(".")[1] for name in sys.modules if name.startswith("ml.")}
    public = {name for name in vars(ml) if name[0].isalpha()} - submodules
    assert public == set(ml.__all__)


def test_every_error_and_capability_is_at_the_top() -> None:
    import ml.capabilities

    assert set(ml.errors.__all__) <= set(ml.__all__)
    assert set(ml.capabilities.__all__) <= set(ml.__all__)


# Errors.

BUILTINS = {
    "BackendNotFoundError": LookupError,
    "BackendUnavailableError": RuntimeError,
    "BoundsError": IndexError,
    "ClosedError": RuntimeError,
    "DTypeError": TypeError,
    "DeviceError": RuntimeError,
    "ExportError": BufferError,
    "GroupError": RuntimeError,
    "NotSupportedError": NotImplementedError,
    "OptionError": TypeError,
    "PluginError": RuntimeError,
    "ReadOnlyError": ValueError,
    "ShapeError": ValueError,
}


@pytest.mark.parametrize("name", sorted({*ml.errors.__all__} - {"MLError"}))
def test_every_error_is_an_ml_error_and_the_builtin_one_expects(name: str) -> None:
    error = getattr(ml, name)
    assert issubclass(error, ml.MLError)
    assert issubclass(error, BUILTINS[name])
    assert error.__doc__


# Dtypes.


def test_dtypes_have_numpys_widths_and_kinds() -> None:
    assert DType.BF16.numpy == ml_dtypes.bfloat16
    assert {dtype.name: dtype.itemsize for dtype in ml.STORAGE_DTYPES} == {
        "F32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1, "I32": 4, "I64": 8, "BOOL": 1,
    }  # fmt: skip
    for dtype in ml.STORAGE_DTYPES:
        assert DType.from_numpy(dtype.numpy) is dtype
        assert dtype.is_float + dtype.is_integer + (dtype is DType.BOOL) == 1


def test_block_formats_are_no_element_types() -> None:
    assert set(DType) - ml.STORAGE_DTYPES == {DType.Q8_0, DType.Q4_0}
    for dtype in (DType.Q8_0, DType.Q4_0):
        assert dtype.is_quantized
        assert not dtype.is_float
        with pytest.raises(ml.DTypeError, match="storage format"):
            _ = dtype.numpy
        with pytest.raises(ml.DTypeError):
            _ = dtype.itemsize


@pytest.mark.parametrize("dtype", [np.float64, np.uint16, np.complex64, "U3", ">f4"])
def test_other_numpy_dtypes_have_no_dtype(dtype: object) -> None:
    with pytest.raises(ml.DTypeError, match="float32"):
        DType.from_numpy(dtype)


def test_dtypes_survive_pickling_and_hash_alike() -> None:
    import pickle

    for dtype in DType:
        again = pickle.loads(pickle.dumps(dtype))
        assert again is dtype
        assert hash(again) == hash(dtype)


# Records.


@pytest.mark.parametrize(
    "wrong",
    [
        {"cache_padding": 0},
        {"mask_batch_padding": -1},
        {"cache_padding": "4"},
        {"mask_batch_padding": 1.5},
        {"permuted_v": 1},
        {"mask_dtype": DType.I32},
        {"mask_dtype": "F32"},
        {"layout": "diagonal"},
    ],
)
def test_a_cache_config_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ml.MLError, match=f"CacheConfig: {name}={value!r}; "):
        ml.CacheConfig(**wrong)  # type: ignore[arg-type]


def test_features_know_what_is_absent() -> None:
    assert ml.Features().has("matmul")
    storage = ml.Features(absent=frozenset({"compute", "repeat"}))
    assert not storage.has("matmul")
    assert not storage.has("repeat")
    assert storage.has("copy")


# The house.


@pytest.mark.parametrize("name", ["numpy", "torch", "mlx"])
def test_the_real_framework_is_not_shadowed(name: str) -> None:
    framework = pytest.importorskip(name)
    paths = [framework.__file__] if framework.__file__ else list(framework.__path__)
    assert not [path for path in paths if Path(path).is_relative_to(ROOT / "backends")]
    assert importlib.import_module(f"backends.{name}") is not framework


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_subclasses_of_ndarray_are_taken_for_their_memory() -> None:
    with ml.open_backend("numpy") as backend, backend.new_context() as ctx:
        square = np.matrix([[1.0, 2.0], [3.0, 4.0]], np.float32)
        tensor = ctx.from_native(square)
        np.testing.assert_array_equal(tensor.mul(ctx, tensor).to_numpy(), [[1, 4], [9, 16]])
        np.testing.assert_array_equal(tensor.sum(ctx, 1).to_numpy(), [3, 7])
        square[0, 0] = 9
        assert tensor.to_numpy()[0, 0] == 9
        with pytest.raises(ml.DTypeError, match="masked array"):
            ctx.from_native(np.ma.masked_equal(np.arange(3, dtype=np.float32), 1))
