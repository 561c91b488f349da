"""The NumPy backend, counting what attention reads of keys and values, and how often it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml
from backends.numpy.backend import NumpyBackend, NumpyContext, NumpyTensor
from kvcache import CausalCache
from ml.nn import generic_attention, generic_partial_attention
from ml.testing.ragged import ragged_reference

_WRITES = ("write_from", "_scatter")
_OPERATIONS = (
    *_WRITES, "_gather", "_concat", "_repeat", "_cast", "_binary", "_unary", "_scale", "_clamp", "_matmul",
    "_softmax", "_reduce", "_argsort", "_top_k", "_compare", "_where",
)  # fmt: skip
"""What computes or moves elements. Views are free."""


class CountingBackend(NumpyBackend):
    """Open it by itself; it is no plugin.

    ``read``: bytes of keys and values that attention was given, and those that were read to be gathered or
    copied before: a copy counts twice. ``calls``: operations that compute or move elements, an attention
    being one. Both of the ``step`` that ``count`` ran last.
    """

    ragged_attention: Any = None
    """Not by the kernels of numba: the calls of attention are counted."""
    read = calls = 0
    _inside = False
    _stored: frozenset[int] = frozenset()

    def count(self, cache: CausalCache, step: Callable[[], object]) -> CountingBackend:
        """Run ``step``, which reads this cache."""
        buffers = (half for layer in cache.storage.buffers.values() for half in (layer.key, layer.value))
        self._stored = frozenset(id(half.tensor.storage) for half in buffers)
        self.read = self.calls = 0
        step()
        return self

    def run(self, read: Callable[[], int], body: Callable[[], Any]) -> Any:
        """One call, with whatever it calls itself; ``read`` says how many bytes of keys and values."""
        if self._inside:
            return body()
        self.calls += 1
        self._inside = True
        try:
            found = body()
        finally:
            self._inside = False
        self.read += read()
        return found

    def stored(self, tensor: Any) -> bool:
        """Whether this shows what the cache stores."""
        return isinstance(tensor, NumpyTensor) and id(tensor.storage) in self._stored

    def attention(self, ctx, query, key, value, mask, scale, sinks=None) -> ml.Tensor:
        """See ``ml.SupportsAttention``."""
        body = lambda: generic_attention(ctx, query, key, value, mask, scale, sinks)  # noqa: E731
        return self.run(lambda: key.nbytes + value.nbytes, body)

    def partial_attention(self, ctx, query, key, value, mask, scale) -> tuple[ml.Tensor, ml.Tensor]:
        """See ``ml.SupportsPartialAttention``."""
        body = lambda: generic_partial_attention(ctx, query, key, value, mask, scale)  # noqa: E731
        return self.run(lambda: key.nbytes + value.nbytes, body)

    def attention_calls(self, *call) -> None:
        """See ``ml.SupportsPartialAttention``. None: calls are counted one by one."""

    def kv_store(self, *halves) -> None:
        """See ``ml.SupportsKVStorage``. None: copies are made one by one, and counted."""

    def _new_context(self, max_graph_nodes: int) -> NumpyContext:
        return _Context(self, max_graph_nodes)


class CountingRaggedBackend(CountingBackend):
    """With a kernel for ragged batches, which reads each segment of its plan once."""

    def ragged_attention(self, ctx, query, key, value, plan, scale, sinks=None, formats=None) -> ml.Tensor:
        """See ``ml.SupportsRaggedAttention``."""
        each = (key.nbytes + value.nbytes) // key.shape[0]
        native = [x.native for x in (query, key, value)]
        logits = None if sinks is None else sinks.to_numpy()
        body = lambda: ctx.from_numpy(ragged_reference(*native, plan, scale, logits), query.dtype)  # noqa: E731
        return self.run(lambda: each * int(plan.segments[:, 2].sum()), body)


class _Tensor(NumpyTensor):
    __slots__ = ()


def _counted(name: str) -> Callable[..., Any]:
    plain = getattr(NumpyTensor, name)

    def method(self: _Tensor, *args: Any) -> Any:
        backend: Any = self.backend
        found: list[Any] = []

        def read() -> int:
            if name == "_gather":
                return found[0].nbytes if backend.stored(self) else 0
            given = args if name in _WRITES else (self, *args)
            return sum(tensor.nbytes for tensor in given if backend.stored(tensor))

        def body() -> Any:
            found.append(plain(self, *args))
            return found[0]

        return backend.run(read, body)

    return method


for _name in _OPERATIONS:
    setattr(_Tensor, _name, _counted(_name))


def _made(name: str) -> Callable[..., Any]:
    plain = getattr(NumpyContext, name)

    def method(self: NumpyContext, *args: Any) -> Any:
        tensor = plain(self, *args)
        tensor.__class__ = _Tensor
        return tensor

    return method


class _Context(NumpyContext):
    tensor = _Tensor


for _name in ("_empty", "_full", "_from_array", "_from_native"):
    setattr(_Context, _name, _made(_name))
