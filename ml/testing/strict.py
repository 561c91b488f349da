"""A backend that refuses everything the contract does not promise: code that runs on it relies only on the
contract.

    from ml.testing.strict import strict

    with strict(ml.open_backend("numpy")) as backend:
        ...

It wraps any backend through the required protocol, and is slow. Where the contract leaves something open, its
behaviour is deliberately unusual:

* It has only the members of ``ml.Backend``, ``ml.Context`` and ``ml.Tensor``, and no capabilities.
* ``empty`` is filled with NaN or an extreme integer. A cast of a float outside the integer's range gives an
  extreme integer too.
* ``strides`` of axes of size 1 and of empty tensors are huge.
* ``native`` is a read-only snapshot, a NumPy array. A later write to the storage poisons the snapshot, since
  only some frameworks would show that write.
* Indices in an I32 tensor, normally the caller's responsibility, are checked: BoundsError outside the axis,
  ShapeError if a row is written twice.
* A context belongs to the first thread that uses it: DeviceError in any other.
* ``input`` and ``layer`` return a new context each time.

The contract's promises hold: ``to_numpy`` completes pending work, with or without ``compute``, and returns a
copy that the caller may write to.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from ml.dtypes import DType
from ml.errors import BoundsError, DeviceError, ShapeError
from ml.protocols import Backend, Context, Tensor

__all__ = ["strict"]

Run = Callable[[str, Callable[[], Any]], Any]
"""Called as ``run(name, call)`` for each call to the backend; returns ``call()``."""

ABSURD_STRIDE = 1 << 40
_VIEWS = frozenset({"view", "slice", "permute", "reshape"})
_WRITES = frozenset({"copy", "set_rows"})


def strict(backend: Backend, run: Run = lambda name, call: call()) -> Backend:
    """``backend``, reduced to the required protocol and its promises.

    Every call to the backend goes through ``run``, which may count it or make it fail. Closing it closes
    ``backend``.
    """
    return cast("Backend", _Backend(backend, run))


class _Wrapper:
    def __init__(self, inner: Any, run: Run, owner: Any = None) -> None:
        self._inner, self._run = inner, run
        self._owner: Any = self if owner is None else owner
        """The strict backend."""

    def _wrap(self, result: Any) -> Any:
        if isinstance(result, tuple):
            return tuple(self._wrap(part) for part in result)
        kind = type(result)
        if kind not in _WRAPPERS:  # cached: a protocol check inspects every member
            context = _Context if isinstance(result, Context) else None
            _WRAPPERS[kind] = _Tensor if isinstance(result, Tensor) else context
        wrapper = _WRAPPERS[kind]
        return result if wrapper is None else wrapper(result, self._run, self._owner)

    def _unwrap(self, value: Any) -> Any:
        if isinstance(value, _Wrapper):
            return value._inner
        if isinstance(value, type(self._inner)):
            raise DeviceError(f"{value!r} belongs to the wrapped backend, not to the strict one around it")
        return value

    def _check(self, name: str, arguments: Sequence[Any]) -> None:
        """Refuse calls that the wrapped backend may accept."""

    def _made(self, name: str, result: Any, arguments: Sequence[Any]) -> Any:
        """The result of the call, wrapped."""
        return self._wrap(result)


_WRAPPERS: dict[type, Any] = {}


class _Scope(_Wrapper):
    def __enter__(self) -> Any:
        self._inner.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self._run("close", self._inner.close)
        else:
            self._inner.close()

    def __repr__(self) -> str:
        return f"<strict {self._inner!r}>"


class _BackendRules(_Scope):
    def __init__(self, inner: Any, run: Run) -> None:
        super().__init__(inner, run)
        self._natives: weakref.WeakValueDictionary[int, np.ndarray] = weakref.WeakValueDictionary()
        """The snapshots whose views ``native`` returned, by id."""


class _ContextRules(_Scope):
    _thread: int | None = None

    @property
    def backend(self) -> Any:
        return self._owner

    def _check(self, name: str, arguments: Sequence[Any]) -> None:
        if self._thread is None:
            self._thread = threading.get_ident()
        elif self._thread != threading.get_ident() and name != "close":
            raise DeviceError(
                f"{name}: this context is used by thread {self._thread}; make one for each thread with "
                "backend.new_context()"
            )

    def _unwrap(self, value: Any) -> Any:
        """An array returned by ``native`` is unwrapped to its snapshot: tensors over it may be written."""
        if isinstance(value, np.ndarray) and value.base is not None:
            snapshot = self._owner._natives.get(id(value.base))
            if value.base is snapshot and (value.shape, value.strides) == (snapshot.shape, snapshot.strides):
                return snapshot
        return super()._unwrap(value)

    def _made(self, name: str, result: Any, arguments: Sequence[Any]) -> Any:
        if name == "forward":
            return self
        if name == "empty":
            poison(self._inner, result)
        return self._wrap(result)


class _TensorRules(_Wrapper):
    _lent: list[weakref.ref[np.ndarray]] | None = None
    """Snapshots of this storage that callers may still hold; shared by its views."""

    @property
    def strides(self) -> tuple[int, ...]:
        shape = self._inner.shape
        if 0 in shape:
            return (ABSURD_STRIDE,) * len(shape)
        return tuple(
            ABSURD_STRIDE if size == 1 else stride
            for size, stride in zip(shape, self._inner.strides, strict=True)
        )

    @property
    def native(self) -> np.ndarray:
        snapshot = np.array(self._inner.native)
        self._snapshots().append(weakref.ref(snapshot))
        self._owner._natives[id(snapshot)] = snapshot
        lent = snapshot.view()
        lent.flags.writeable = False
        return lent

    def _snapshots(self) -> list[weakref.ref[np.ndarray]]:
        if self._lent is None:
            self._lent = []
        return self._lent

    def _check(self, name: str, arguments: Sequence[Any]) -> None:
        if arguments and isinstance(arguments[0], _ContextRules):
            arguments[0]._check(name, ())
        if name in ("rows", "set_rows"):
            operands = arguments[1 + (name == "set_rows") :]
            axis = operands[1] if len(operands) > 1 else 0
            if operands and isinstance(operands[0], _TensorRules) and isinstance(axis, int):
                _check_rows(name, operands[0]._inner, self._inner.shape, axis)

    def _made(self, name: str, result: Any, arguments: Sequence[Any]) -> Any:
        if name in _WRITES:
            written = arguments[1] if name == "copy" else self
            for reference in written._snapshots():
                if (snapshot := reference()) is not None:
                    snapshot[...] = extreme(written._inner.dtype)
            written._snapshots().clear()
            return written
        made = self._wrap(result)
        if name in _VIEWS:
            made._lent = self._snapshots()
        elif name == "cast" and self._inner.dtype.is_float and made._inner.dtype.is_integer:
            _poison_overflow(arguments[0]._inner, self._inner, made._inner)
        return made


def extreme(dtype: DType) -> Any:
    """NaN, the least integer, or True."""
    if dtype.is_float:
        return math.nan
    return True if dtype is DType.BOOL else np.iinfo(dtype.numpy).min or np.iinfo(dtype.numpy).max


def poison(ctx: Context, tensor: Tensor) -> None:
    ctx.full(tensor.shape, extreme(tensor.dtype), tensor.dtype).copy(ctx, tensor)


def _poison_overflow(ctx: Context, source: Tensor, made: Tensor) -> None:
    """Replace integers cast from floats out of range, for which frameworks give different integers."""
    values, limits = source.to_numpy().astype(np.float64), np.iinfo(made.dtype.numpy)
    with np.errstate(invalid="ignore"):
        outside = ~((values > float(limits.min) - 1) & (values < float(limits.max) + 1))
    if outside.any():
        host = made.to_numpy()
        host[outside] = extreme(made.dtype)
        ctx.from_numpy(host).copy(ctx, made)


def _check_rows(op: str, indices: Tensor, shape: tuple[int, ...], axis: int) -> None:
    """Check indices that the wrapped backend has accepted as I32 with one axis."""
    if indices.dtype is not DType.I32 or len(indices.shape) != 1 or not -len(shape) <= axis < len(shape):
        return
    host, size = indices.to_numpy(), shape[axis]
    if host.size and (host.min() < 0 or host.max() >= size):
        raise BoundsError(f"{op}: indices {host.min()}..{host.max()} of an I32 tensor outside [0, {size})")
    if op == "set_rows" and np.unique(host).size != host.size:
        raise ShapeError(f"{op}: an I32 tensor has the same index twice; the rows to write must be distinct")


def _method(name: str) -> Callable[..., Any]:
    def method(self: _Wrapper, *args: Any, **options: Any) -> Any:
        operands = (*args, *options.values())
        self._check(name, operands)
        plain = [self._unwrap(value) for value in args]
        named = {key: self._unwrap(value) for key, value in options.items()}
        result = self._run(name, lambda: getattr(self._inner, name)(*plain, **named))
        return self._made(name, result, operands)

    method.__name__ = name
    return method


def _property(name: str) -> property:
    return property(lambda self: getattr(self._inner, name))


def _members(protocol: type, rules: type) -> dict[str, Any]:
    """Every public member of a protocol that ``rules`` leaves to the wrapped backend, and ``__array__``."""
    members: dict[str, Any] = {}
    for name, member in vars(protocol).items():
        if (not name.startswith("_") or name == "__array__") and not hasattr(rules, name):
            members[name] = _property(name) if isinstance(member, property) else _method(name)
    return members


_DLPACK = {"__dlpack__": _method("__dlpack__"), "__dlpack_device__": _method("__dlpack_device__")}
_Tensor: Any = type("_Tensor", (_TensorRules,), _members(Tensor, _TensorRules) | _DLPACK)
_Context: Any = type("_Context", (_ContextRules,), _members(Context, _ContextRules))
_Backend: Any = type("_Backend", (_BackendRules,), _members(Backend, _BackendRules))
