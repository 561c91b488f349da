"""A backend that offers the required protocol and nothing else, and fails when told to.

It wraps another one. What runs on it uses no more than ``ml.protocols`` promises; and since every
call passes through a :class:`Plan`, any one of them can be made to raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import ml


class InjectedError(ml.DeviceError):
    """What a planned failure raises."""


class Plan:
    """The names of the calls made, and which of them fails.

    ``fail_at`` counts from the call after :meth:`arm`; ``after`` lets the call do its work first, as a
    device does whose error comes late.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._fail_at: int | None = None
        self._after = False
        self._error: type[BaseException] = InjectedError

    def arm(
        self, fail_at: int | None, after: bool = False, error: type[BaseException] = InjectedError
    ) -> None:
        self.calls.clear()
        self._fail_at, self._after, self._error = fail_at, after, error

    def run(self, name: str, call: Callable[[], Any]) -> Any:
        fails = len(self.calls) == self._fail_at
        self.calls.append(name)
        if fails and not self._after:
            raise self._error(f"{name}: injected before it ran")
        result = call()
        if fails:
            raise self._error(f"{name}: injected after it ran")
        return result


class _Wrapper:
    def __init__(self, inner: Any, plan: Plan, backend: Any) -> None:
        self._inner, self._plan, self._backend = inner, plan, backend

    def _wrap(self, result: Any) -> Any:
        if isinstance(result, tuple):
            return tuple(self._wrap(part) for part in result)
        kind = type(result)
        if kind not in _WRAPPERS:  # remembered: a protocol check looks at every member
            context = _Context if isinstance(result, ml.Context) else None
            _WRAPPERS[kind] = _Tensor if isinstance(result, ml.Tensor) else context
        wrapper = _WRAPPERS[kind]
        return result if wrapper is None else wrapper(result, self._plan, self._backend)


_WRAPPERS: dict[type, Any] = {}


def _unwrap(value: Any) -> Any:
    return value._inner if isinstance(value, _Wrapper) else value


def _method(name: str) -> Callable[..., Any]:
    def method(self: _Wrapper, *args: Any, **options: Any) -> Any:
        plain = [_unwrap(arg) for arg in args]
        named = {key: _unwrap(value) for key, value in options.items()}
        return self._wrap(self._plan.run(name, lambda: getattr(self._inner, name)(*plain, **named)))

    method.__name__ = name
    return method


def _property(name: str) -> property:
    return property(lambda self: getattr(self._inner, name))


def _members(protocol: type) -> dict[str, Any]:
    """Every public member of a protocol, passing through, and what NumPy asks for."""
    found: dict[str, Any] = {}
    for name, member in vars(protocol).items():
        if not name.startswith("_") or name == "__array__":
            found[name] = _property(name) if isinstance(member, property) else _method(name)
    return found


class _Scope(_Wrapper):
    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self._plan.run("close", self._inner.close)
        else:
            self._inner.close()


_Tensor = type("_Tensor", (_Wrapper,), _members(ml.Tensor))
_Context = type(
    "_Context", (_Scope,), _members(ml.Context) | {"backend": property(lambda self: self._backend)}
)
_Backend = type("_Backend", (_Scope,), _members(ml.Backend))


def only_protocol(backend: ml.Backend, plan: Plan | None = None) -> ml.Backend:
    """``backend`` with the required protocol and nothing else."""
    wrapped = _Backend(backend, plan or Plan(), None)
    wrapped._backend = wrapped
    return cast("ml.Backend", wrapped)
