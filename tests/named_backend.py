"""A backend that shows what the protocols name and nothing else: NumPy's, behind classes of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import ml

_TENSOR = """
    view slice permute reshape contiguous cast rows concat repeat copy set_rows add sub mul div scale neg exp
    log sqrt sin cos tanh sigmoid silu relu abs round gelu clamp matmul softmax sum mean max argmax argsort
    top_k rms_norm compare where to_numpy
"""
_CONTEXT = "empty zeros full arange from_numpy from_native from_bytes"


class Named:
    """Forwards the calls that it lists, with what stands behind each argument."""

    __slots__ = ("_behind",)

    def __init__(self, behind: Any) -> None:
        self._behind = behind


def _forward(name: str) -> Callable[..., Any]:
    def call(self: Named, *args: Any, **options: Any) -> Any:
        given = (self, *args, *options.values())
        found = getattr(self._behind, name)(
            *map(_behind, args), **{key: _behind(value) for key, value in options.items()}
        )
        if isinstance(found, tuple):
            return tuple(map(NamedTensor, found))
        if not isinstance(found, ml.Tensor):
            return found
        same = [one for one in given if isinstance(one, NamedTensor) and one._behind is found]
        return same[0] if same else NamedTensor(found)

    call.__name__ = name
    return call


def _behind(value: Any) -> Any:
    return value._behind if isinstance(value, Named) else value


class NamedTensor(Named):
    __slots__ = ()

    shape = property(lambda self: self._behind.shape)
    strides = property(lambda self: self._behind.strides)
    dtype = property(lambda self: self._behind.dtype)
    nbytes = property(lambda self: self._behind.nbytes)
    native = property(lambda self: self._behind.native)


class NamedContext(Named):
    """It does not tell its backend, so that nothing beyond the required core can be asked for."""

    __slots__ = ()

    max_graph_nodes = property(lambda self: self._behind.max_graph_nodes)

    def forward(self, *tensors: Any) -> Self:
        self._behind.forward(*map(_behind, tensors))
        return self

    def compute(self, *tensors: Any) -> None:
        self._behind.compute(*map(_behind, tensors))

    def reserve(self) -> None:
        self._behind.reserve()

    def input(self) -> Self:
        return self

    def layer(self, i: int) -> Self:
        return self

    def close(self) -> None:
        self._behind.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


for _name in _TENSOR.split():
    setattr(NamedTensor, _name, _forward(_name))
for _name in _CONTEXT.split():
    setattr(NamedContext, _name, _forward(_name))


class NamedBackend:
    name = "named"

    def __init__(self) -> None:
        self._numpy = ml.open_backend("numpy")
        self.devices = self._numpy.devices

    def new_context(self, max_graph_nodes: int | None = None) -> NamedContext:
        return NamedContext(self._numpy.new_context(max_graph_nodes))

    def memory(self) -> ml.BackendMemory:
        return self._numpy.memory()

    def close(self) -> None:
        self._numpy.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
