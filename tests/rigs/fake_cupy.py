"""A double of CuPy on NumPy: its API as far as backends/cupy uses it, and stricter than CuPy is.

It keeps CuPy's rules where NumPy would let a mistake pass: no implicit conversion from or to NumPy
arrays; work only on arrays of the current device; unwritten memory holds garbage; memory runs out.
And it refuses what the backend must not rely on: BF16 in anything but a cast from or to F32, and
F16 casts other than that. Signatures are CuPy's; test_backend_cupy compares them where CuPy is
installed. What it cannot show is whether CuPy's kernels compute what NumPy does.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from ..backends.kernel_emulator import Kernels, names_of

BF16 = np.dtype(ml_dtypes.bfloat16)
TOTAL = 1 << 30
DEVICES = 2
LOG: list[tuple[str, int, Any]] = []
"""(operation, device, stream) of everything that ran."""
_state = threading.local()


class CUDARuntimeError(RuntimeError):
    pass


class OutOfMemoryError(MemoryError):
    pass


# Devices, streams, memory.


class _Scope:
    stack = ""

    def __enter__(self) -> Any:
        entered = getattr(_state, self.stack, None)
        if entered is None:
            setattr(_state, self.stack, entered := [])
        entered.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        getattr(_state, self.stack).pop()


class Device(_Scope):
    stack = "devices"

    def __init__(self, device: int | None = None) -> None:
        self.id = current_device() if device is None else device


class Stream(_Scope):
    stack = "streams"

    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False) -> None:
        self.device_id = -1 if null else current_device()

        self.ptr = id(self)

    def synchronize(self) -> None:
        LOG.append(("synchronize", current_device(), self))

    def wait_event(self, event: Event) -> None:
        assert event.recorded is not None, "an event that nobody recorded is no order"
        LOG.append(("wait_event", current_device(), self))


class Event:
    """Work is done when it is asked for, so that every event that was recorded is reached."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.recorded: Stream | None = None

    def record(self, stream: Any = None) -> None:
        self.recorded = stream or get_current_stream()
        LOG.append(("record", current_device(), self.recorded))

    @property
    def done(self) -> bool:
        return self.recorded is not None

    def synchronize(self) -> None:
        assert self.recorded is not None
        LOG.append(("synchronize event", current_device(), self.recorded))


class ExternalStream(Stream):
    pass


NULL = Stream(null=True)


def current_device() -> int:
    return _state.devices[-1].id if getattr(_state, "devices", None) else 0


def get_current_stream(device_id: int | None = None) -> Stream:
    found: Stream = _state.streams[-1] if getattr(_state, "streams", None) else NULL
    return found


def ran(op: str) -> None:
    LOG.append((op, current_device(), get_current_stream()))


class Pool:
    used = [0] * DEVICES
    total = [0] * DEVICES

    def used_bytes(self) -> int:
        return self.used[current_device()]

    def total_bytes(self) -> int:
        return self.total[current_device()]

    def free_all_blocks(self, stream: Any = None) -> None:
        self.total[current_device()] = self.used[current_device()]


POOL = Pool()


class MemoryPointer:
    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.offset = mem, offset

    device_id = property(lambda self: self.mem.device)
    ptr = property(lambda self: self.mem.bytes.ctypes.data + self.offset)

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.offset + offset)

    def copy_from_device_async(self, src: MemoryPointer, size: int, stream: Any = None) -> None:
        assert self.device_id == current_device()
        ran("copy_from_device")
        self.mem.bytes[self.offset :][:size] = src.mem.bytes[src.offset :][:size]


class _Memory:
    def __init__(self, size: int, device: int) -> None:
        self.bytes = np.full(size, 0xA5, np.uint8)
        self.device = device


def _give_back(device: int, size: int) -> None:
    POOL.used[device] -= size


def alloc(size: int) -> MemoryPointer:
    device, block = current_device(), -(-size // 512) * 512
    if POOL.used[device] + block > TOTAL:
        raise OutOfMemoryError(f"Out of memory allocating {block:,} bytes (allocated so far: x bytes)")
    POOL.used[device] += block
    POOL.total[device] = max(POOL.total[device], POOL.used[device])
    memory = _Memory(size, device)
    weakref.finalize(memory, _give_back, device, block)
    return MemoryPointer(memory, 0)


def alloc_pinned_memory(size: int) -> np.ndarray:
    return np.full(size, 0xA5, np.uint8)


def _raw(address: int, nbytes: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


def memcpy2DAsync(
    dst: int, dpitch: int, src: int, spitch: int, width: int, height: int, kind: int, stream: int
) -> None:
    assert stream == get_current_stream().ptr
    assert width <= min(dpitch, spitch)
    ran("memcpy2D")
    for row in range(height):
        _raw(dst + row * dpitch, width)[...] = _raw(src + row * spitch, width)


class _Cublas:
    """What a product of matrices is in BLAS: column by column, alpha * op(A) @ op(B) + beta * C."""

    CUBLAS_OP_N, CUBLAS_OP_T = 0, 1
    CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT = 68, -1

    @staticmethod
    def gemmStridedBatchedEx(
        handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int,
        A: int, Atype: int, lda: int, strideA: int, B: int, Btype: int, ldb: int, strideB: int, beta: int,
        C: int, Ctype: int, ldc: int, strideC: int, batchCount: int, computeType: int, algo: int,
    ) -> None:  # fmt: skip
        assert (handle, computeType, algo) == (current_device(), 68, -1)
        assert (Atype, Ctype) == (Btype, 0), "a sum of parts may be rounded to the type of C"
        assert _raw(alpha, 4).view(np.float32) == 1
        assert _raw(beta, 4).view(np.float32) == 0
        ran("gemm")
        dtype = {14: BF16, 2: np.dtype(np.float16)}[Atype]

        def matrix(address: int, dtype: np.dtype, rows: int, columns: int, leading: int) -> np.ndarray:
            assert leading >= max(1, rows), "CUBLAS_STATUS_INVALID_VALUE"
            size = dtype.itemsize
            raw = _raw(address, size * (leading * (columns - 1) + rows)).view(dtype)
            return np.lib.stride_tricks.as_strided(raw, (rows, columns), (size, size * leading))

        for i in range(batchCount):
            a = matrix(A + 2 * i * strideA, dtype, *((k, m) if transa else (m, k)), lda).astype(np.float32)
            b = matrix(B + 2 * i * strideB, dtype, *((n, k) if transb else (k, n)), ldb).astype(np.float32)
            product = (a.T if transa else a) @ (b.T if transb else b)
            matrix(C + 4 * i * strideC, np.dtype(np.float32), m, n, ldc)[...] = product


def memGetInfo() -> tuple[int, int]:
    return TOTAL - POOL.total[current_device()], TOTAL


# Arrays.


def host(x: Any) -> Any:
    """What a kernel sees of an argument."""
    if isinstance(x, ndarray):
        if x.data.device_id != current_device():
            raise ValueError(f"Array device must be same as the current device: {x.data.device_id}")
        return x.array
    if isinstance(x, np.ndarray):
        raise TypeError(f"Unsupported type {type(x)}")
    return x


def kernel(op: str, function: Callable[..., Any], *args: Any, **options: Any) -> ndarray:
    """Run a function of NumPy on the device; BF16 is not for kernels."""
    ran(op)
    arrays = [host(x) for x in args]
    if any(getattr(x, "dtype", None) == BF16 for x in arrays):
        raise TypeError(f"{op}: the backend has to widen BF16")
    return made(function(*arrays, **options))


def made(array: Any) -> ndarray:
    """A result in memory of its own, C-contiguous."""
    found = np.asarray(array)
    result = ndarray(found.shape, found.dtype)
    result.array[...] = found
    return result


def check_cast(source: np.dtype, target: np.dtype) -> None:
    if target == np.dtype(bool) and (source == BF16 or source.kind == "f"):
        raise TypeError(f"{source} to bool: with -ftz=true subnormal numbers would be false")
    pair = {source, target}
    if len(pair) > 1 and pair & {BF16, np.dtype(np.float16)} and np.dtype(np.float32) not in pair:
        raise TypeError(f"{source} to {target}: the backend has to go by way of float32")


class ndarray:  # noqa: N801
    __array_priority__ = 100

    def __init__(
        self, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None, order: str = "C"
    ) -> None:
        if strides is not None and memptr is None:
            raise ValueError("memptr is required if strides is given.")
        dtype = np.dtype(dtype)
        self.data = alloc(math.prod(shape) * dtype.itemsize) if memptr is None else memptr
        whole = self.data.mem.bytes
        raw = whole if 0 not in shape else np.empty(0, np.uint8)
        self.array = np.ndarray(shape, dtype, raw, self.data.offset if raw.size else 0, strides)

    shape = property(lambda self: self.array.shape)
    dtype = property(lambda self: self.array.dtype)
    strides = property(lambda self: self.array.strides)
    size = property(lambda self: self.array.size)
    nbytes = property(lambda self: self.array.nbytes)
    ndim = property(lambda self: self.array.ndim)
    flags = property(lambda self: self.array.flags)
    device = property(lambda self: Device(self.data.device_id))

    def _alias(self, array: np.ndarray) -> ndarray:
        result: ndarray = object.__new__(ndarray)
        start = array.__array_interface__["data"][0] - self.data.mem.bytes.ctypes.data
        result.data = MemoryPointer(self.data.mem, start if array.size else self.data.offset)
        result.array = array
        return result

    def __array__(self, *args: Any, **options: Any) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def view(self, dtype: Any = None, type: Any = None) -> ndarray:
        return self._alias(self.array.view(dtype))

    def astype(
        self, dtype: Any, order: str = "K", casting: Any = None, subok: Any = None, copy: bool = True
    ) -> ndarray:
        target = np.dtype(dtype)
        check_cast(self.dtype, target)
        if target == self.dtype and not copy and (order == "K" or self.flags.c_contiguous):
            return self
        ran("astype")
        with np.errstate(all="ignore"):
            return made(host(self).astype(target))

    def reshape(self, *shape: Any, order: str = "C") -> ndarray:
        return self._alias(self.array.reshape(*shape))

    def copy(self, order: str = "C") -> ndarray:
        ran("copy")
        return made(host(self))

    def fill(self, value: Any) -> None:
        ran("fill")
        host(self).fill(value)

    def set(self, arr: np.ndarray, stream: Any = None) -> None:
        if not isinstance(arr, np.ndarray) or arr.dtype != self.dtype or arr.shape != self.shape:
            raise TypeError(f"cannot set {arr!r}")
        ran("set")
        host(self)[...] = arr

    def max(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return self._reduce("max", axis=axis, keepdims=keepdims)

    def sum(self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return self._reduce("sum", axis=axis, dtype=dtype, keepdims=keepdims)

    def mean(self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return self._reduce("mean", axis=axis, dtype=dtype, keepdims=keepdims)

    def _reduce(self, op: str, **options: Any) -> ndarray:
        if not self.size:
            raise ValueError(f"zero-size array to reduction operation {op}")
        return kernel(op, getattr(np, op), self, **options)

    def __getitem__(self, key: Any) -> ndarray:
        if any(
            isinstance(part, (ndarray, np.ndarray, list)) for part in (key if type(key) is tuple else (key,))
        ):
            raise TypeError("indexing by arrays: use take")
        return self._alias(self.array[key])

    def __setitem__(self, key: tuple[Any, ...], value: Any) -> None:
        ran("scatter")
        if value.dtype == BF16 or self.dtype == BF16 or value.dtype != self.dtype:
            raise TypeError("scatter: the backend has to convert, and to move BF16 as bits")
        host(self)[tuple(host(part) for part in key)] = host(value)

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
    ) -> Any:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self.data.device_id)


def _operator(name: str) -> Callable[..., ndarray]:
    def method(self: ndarray, *others: Any) -> ndarray:
        return kernel(name, lambda *arrays: getattr(arrays[0], name)(*arrays[1:]), self, *others)

    return method


def _in_place(self: ndarray, other: ndarray) -> ndarray:
    ran("itruediv")
    self.array /= host(other)
    return self


for _name in ("add", "sub", "mul", "truediv"):
    setattr(ndarray, f"__{_name}__", _operator(f"__{_name}__"))
    setattr(ndarray, f"__r{_name}__", _operator(f"__r{_name}__"))
ndarray.__neg__ = _operator("__neg__")  # type: ignore[attr-defined]
ndarray.__itruediv__ = _in_place  # type: ignore[attr-defined]


# Functions.


def take(a: ndarray, indices: ndarray, axis: int | None = None, out: Any = None) -> ndarray:
    return kernel("take", lambda x, i: np.take(x, i, axis=axis, mode="wrap"), a, indices)


def arange(start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> ndarray:
    return kernel("arange", lambda: np.arange(start, stop, step, dtype))


def concatenate(
    tup: tuple[ndarray, ...], axis: int = 0, out: Any = None, *, dtype: Any = None, casting: str = "same_kind"
) -> ndarray:
    return kernel("concatenate", lambda *arrays: np.concatenate(arrays, axis=axis), *tup)


def tile(A: ndarray, reps: Any) -> ndarray:
    return kernel("tile", lambda x: np.tile(x, reps), A)


def where(condition: ndarray, x: Any = None, y: Any = None) -> ndarray:
    return kernel("where", np.where, condition, x, y)


def take_along_axis(a: ndarray, indices: ndarray, axis: int) -> ndarray:
    return kernel("take_along_axis", lambda x, i: np.take_along_axis(x, i, axis), a, indices)


def argsort(a: ndarray, axis: int = -1, kind: Any = None) -> ndarray:
    if not a.size:
        raise ValueError("argsort of nothing")
    return kernel("argsort", lambda x: np.argsort(x, axis=axis, kind="stable"), a)


def argmax(
    a: ndarray, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False
) -> ndarray:
    return kernel("argmax", lambda x: np.argmax(x, axis=axis, keepdims=keepdims), a)


def matmul(*args: ndarray) -> ndarray:
    for x in args:
        if any(size == 1 and stride == 0 for size, stride in zip(x.shape, x.strides, strict=True)):
            raise CUDARuntimeError("CUBLAS_STATUS_INVALID_VALUE: a leading dimension of 0")
    return kernel("matmul", np.matmul, *args)


def copyto(dst: ndarray, src: ndarray, casting: str = "same_kind", where: Any = None) -> None:
    """As a parallel kernel does: an overlap that was not read first comes out wrong."""
    ran("copyto")
    target, source = host(dst), host(src)
    if target.dtype == source.dtype == BF16:
        raise TypeError("copyto: the backend has to move BF16 as bits")
    check_cast(source.dtype, target.dtype)
    if not np.can_cast(source.dtype, target.dtype, casting):
        raise TypeError(f"cannot cast {source.dtype} to {target.dtype}: {casting}")
    if target.shape != source.shape:
        raise ValueError("the backend has to give one shape")
    if np.may_share_memory(target, source):
        raise RuntimeError("copyto: an overlap is undefined")
    with np.errstate(all="ignore"):
        target[...] = source.astype(target.dtype)


def asarray(
    a: Any, dtype: Any = None, order: Any = None, *, copy: Any = None, blocking: bool = False
) -> ndarray:
    if isinstance(a, ndarray):
        return a
    ran("asarray")
    return made(a)


def ascontiguousarray(a: ndarray, dtype: Any = None) -> ndarray:
    if a.dtype == BF16:
        raise TypeError("ascontiguousarray: the backend has to move BF16 as bits")
    return a if a.flags.c_contiguous else a.copy()


def asnumpy(
    a: ndarray, stream: Any = None, order: str = "C", out: Any = None, *, blocking: bool = True
) -> np.ndarray:
    ran("asnumpy")
    if a.dtype == BF16:
        raise TypeError("asnumpy: the backend has to move BF16 as bits")
    return np.array(host(a), order="C")


def may_share_memory(a: ndarray, b: ndarray, max_work: Any = None) -> bool:
    return np.may_share_memory(a.array, b.array)


class RawModule:
    """Kernels in CUDA C, emulated (kernel_emulator.py)."""

    def __init__(self, code: str | None = None, *, path: Any = None, options: tuple[str, ...] = ()) -> None:
        assert code is not None
        self.kernels = Kernels(code, names_of(code))

    def get_function(self, name: str) -> Callable[..., None]:
        def launch(grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
            ran(name)
            for x in args:
                host(x)
            values = [x.data.ptr if isinstance(x, ndarray) else x for x in args]
            self.kernels.launch(name, grid, block[0], values)

        return launch


def get_default_memory_pool() -> Pool:
    return POOL


UFUNCS = (
    "add", "subtract", "multiply", "true_divide", "equal", "not_equal", "less", "less_equal", "greater",
    "greater_equal", "negative", "exp", "log", "sqrt", "sin", "cos", "tanh", "maximum", "minimum", "abs",
    "rint", "left_shift",
)  # fmt: skip
FUNCTIONS = (
    take, arange, concatenate, tile, where, take_along_axis, argsort, argmax, copyto, asarray,
    ascontiguousarray, asnumpy, may_share_memory, get_default_memory_pool,
)  # fmt: skip
CUDA = (
    Device, Stream, ExternalStream, Event, MemoryPointer, alloc, alloc_pinned_memory, get_current_stream,
)  # fmt: skip


def _ufunc(name: str) -> Callable[..., ndarray]:
    return lambda *args: kernel(name, getattr(np, name), *args)


def modules() -> dict[str, ModuleType]:
    """What ``sys.modules`` holds where CuPy is installed."""
    from backends.numpy.erf import erf

    cupy, cuda, nvrtc = ModuleType("cupy"), ModuleType("cupy.cuda"), ModuleType("cupy.cuda.nvrtc")
    special: Any = ModuleType("cupyx.scipy.special")
    special.erf = lambda x: kernel("erf", erf, x)
    runtime = SimpleNamespace(
        getDeviceCount=lambda: DEVICES,
        getDeviceProperties=lambda index: {"name": b"Double %d" % index},
        driverGetVersion=lambda: 13000,
        runtimeGetVersion=lambda: 12090,
        memGetInfo=memGetInfo,
        memcpy2DAsync=memcpy2DAsync,
        getDevice=current_device,
        memcpyHostToDevice=1,
        memcpyDeviceToHost=2,
        CUDA_R_32F=0,
        CUDA_R_16F=2,
        CUDA_R_16BF=14,
    )
    nvrtc.getVersion = lambda: (12, 9)  # type: ignore[attr-defined]
    for thing in CUDA:
        setattr(cuda, thing.__name__, thing)
    vars(cuda).update(runtime=runtime, nvrtc=nvrtc)
    vars(cuda).update(cublas=_Cublas, get_cublas_handle=current_device)
    vars(cupy).update({thing.__name__: thing for thing in (*FUNCTIONS, RawModule, ndarray, matmul)})
    vars(cupy).update({name: _ufunc(name) for name in UFUNCS}, cuda=cuda, __version__="14.2.0", __path__=[])
    return {
        "cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.nvrtc": nvrtc, "cupyx": ModuleType("cupyx"),
        "cupyx.scipy": ModuleType("cupyx.scipy"), "cupyx.scipy.special": special,
    }  # fmt: skip


@contextlib.contextmanager
def logged() -> Iterator[list[tuple[str, int, Any]]]:
    """What ran in the block."""
    start = len(LOG)
    found: list[tuple[str, int, Any]] = []
    yield found
    found += LOG[start:]
