"""Deliberate bugs in pages to host memory, beside those of backend_mutants.py: ``MUTANTS`` has them all."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from ml.testing.transfers import PageTransferTests

from .backend_mutants import MUTANTS, Mutant

__all__ = ["MUTANTS"]


class AtOnce:
    """A transfer that is done when it is begun."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def join(self) -> None:
        pass


def page_out(tensor: Any) -> np.ndarray:
    found: np.ndarray = tensor.to_numpy()
    return found


def page_in(ctx: Any, array: np.ndarray, tensor: Any) -> None:
    ctx.from_numpy(array).copy(ctx, tensor)


def in_by_memory(ctx: Any, array: np.ndarray, tensor: Any) -> None:
    page_in(ctx, array.ravel("K").reshape(array.shape), tensor)


def in_if_writable(ctx: Any, array: np.ndarray, tensor: Any) -> None:
    if not array.flags.writeable:
        raise ValueError("assignment source is read-only")
    page_in(ctx, array, tensor)


def page_mutant(name: str, out: Any = page_out, into: Any = page_in) -> Mutant:
    def plant(numpy: ModuleType) -> None:
        numpy.NumpyBackend.upload = lambda self, ctx, arrays: [ctx.from_numpy(*each) for each in arrays]
        numpy.NumpyBackend.pinned_memory = lambda self, nbytes: np.empty(nbytes, np.uint8)
        numpy.NumpyBackend.page_out = lambda self, ctx, tensors: (list(map(out, tensors)), AtOnce())

        def take(self: Any, ctx: Any, arrays: Any, tensors: Any) -> AtOnce:
            for array, tensor in zip(arrays, tensors, strict=True):
                into(ctx, array, tensor)
            return AtOnce()

        numpy.NumpyBackend.page_in = take

    return Mutant(name, PageTransferTests, plant)


MUTANTS += [
    page_mutant("a_page_is_the_memory_that_it_was_copied_from", out=lambda tensor: tensor.native),
    page_mutant("pages_come_in_as_they_lie_in_memory", into=in_by_memory),
    page_mutant("pages_that_may_only_be_read_stay_out", into=in_if_writable),
]
