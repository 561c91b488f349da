"""Bugs of when things happen, and of what is refused."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ml.base import BaseTensor
from ml.testing.order import OrderTests
from ml.testing.refusals import RefusalTests

from .planting import mutant, override

# Order.


@mutant(OrderTests)
def a_tensor_remembers_what_it_read(numpy: ModuleType) -> None:
    read: dict[Any, Any] = {}

    @override(numpy.NumpyTensor, "to_numpy")
    def _(original: Any, self: Any) -> Any:
        key = (id(self.storage), self.offset, self.shape, self.strides)
        _, array = read.setdefault(key, (self.storage, original(self)))
        return array.copy()


@mutant(OrderTests)
def copies_are_postponed_until_compute(numpy: ModuleType) -> None:
    pending: list[Any] = []

    @override(numpy.NumpyTensor, "write_from")
    def _(original: Any, self: Any, src: Any) -> None:
        pending.append(lambda: original(self, src))

    @override(numpy.NumpyTensor, "to_numpy")
    def _(original: Any, self: Any) -> Any:
        while pending:
            pending.pop(0)()
        return original(self)


@mutant(OrderTests)
def reserve_clears_what_was_forwarded(numpy: ModuleType) -> None:
    forwarded: list[Any] = []
    numpy.NumpyContext._forward = lambda self, tensors: forwarded.extend(tensors)

    @override(numpy.NumpyContext, "reserve")
    def _(original: Any, self: Any) -> None:
        original(self)
        for tensor in forwarded:
            tensor.native[...] = 0
        forwarded.clear()


# Refusals.


@mutant(RefusalTests)
def a_closed_context_still_works(numpy: ModuleType) -> None:
    numpy.NumpyContext.close = lambda self: None


@mutant(RefusalTests)
def tensors_of_other_backends_are_taken(numpy: ModuleType) -> None:
    numpy.NumpyTensor.check_peer = lambda self, op, other: other


@mutant(RefusalTests)
def tensors_can_be_pickled(numpy: ModuleType) -> None:
    numpy.NumpyTensor.__reduce__ = lambda self: (list, ())


@mutant(RefusalTests)
def refusals_are_plain_builtin_errors(numpy: ModuleType) -> None:
    def check(self: Any, op: str, tensor: Any = None) -> None:
        if self.closed:
            raise RuntimeError("closed")

    numpy.NumpyContext.check = check


@mutant(RefusalTests)
def an_operation_is_left_out_without_a_word(numpy: ModuleType) -> None:
    numpy.NumpyTensor._softmax = BaseTensor._softmax
