"""The projection of a model's last hidden states to logits, computed only for the tokens that need it.

Models of mlx-lm compute the logits of every token, which for a prompt can take longer than its layers. While
``OutputHead.only`` holds, the module that projects (``lm_head``, or the embeddings if they are tied) has a
class that leaves the other tokens out.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import mlx.core as mx

__all__ = ["OutputHead"]

Change = Callable[[Any, mx.array], mx.array]
"""From a module and its input to the input that it projects instead."""

_CHANGE: ContextVar[Change | None] = ContextVar("change", default=None)
"""Other threads, which may run the same model meanwhile, have none."""


class OutputHead:
    """The output projection of ``model``: the last that ``run``, which runs it, calls."""

    def __init__(self, model: Any, run: Callable[[], Any]) -> None:
        self._model = model
        projections = {path: part for path, part in model.named_modules() if _method(part) is not None}
        for path in [path for path in projections if path.rpartition(".")[0] in projections]:
            del projections[path]  # wrapped by an adapter
        called: list[Any] = []

        def record(module: Any, hidden: mx.array) -> mx.array:
            called.append(module)
            return hidden

        with _changed([*projections.values()], record):
            run()
        self.path = next((path for path, part in projections.items() if called and part is called[-1]), None)
        """Its place in the model; None: unknown, so that the logits of all tokens are computed."""

    @contextlib.contextmanager
    def only(self, choose: Callable[[mx.array], mx.array]) -> Iterator[list[bool]]:
        """Calls of the model give logits of the hidden states that ``choose`` leaves of all. Yields a list
        that stays empty if they do not, since the place of the projection is unknown.
        """
        happened: list[bool] = []

        def chosen(_module: Any, hidden: mx.array) -> mx.array:
            happened.append(True)
            return choose(hidden)

        with _changed([] if self.path is None else [_at(self._model, self.path)], chosen):
            yield happened


def _at(model: Any, path: str) -> Any:
    """The module at a path, looked up in each call, since an adapter may have replaced it."""
    return functools.reduce(
        lambda part, name: part[int(name)] if name.isdigit() else part[name], path.split("."), model
    )


def _method(module: Any) -> str | None:
    """The name of the method that projects; None for modules that do not."""
    if hasattr(module, "as_linear"):
        return "as_linear"
    projects = "lora_a" in module or getattr(module.get("weight"), "ndim", 0) == 2
    return "__call__" if projects else None


@contextlib.contextmanager
def _changed(modules: Sequence[Any], change: Change) -> Iterator[None]:
    kinds: list[Any] = [getattr(type(module), "unchanged", type(module)) for module in modules]
    token = _CHANGE.set(change)
    try:
        for module, kind in zip(modules, kinds, strict=True):
            module.__class__ = _changing(kind, _method(module) or "__call__")
        yield
    finally:
        for module, kind in zip(modules, kinds, strict=True):
            module.__class__ = kind
        _CHANGE.reset(token)


@functools.cache
def _changing(kind: Any, method: str) -> Any:
    """A class like ``kind`` whose ``method`` projects what the calling thread's change makes of its input.

    ``unchanged`` is ``kind``: another thread may have changed the module's class already, or change it back.
    """
    project = getattr(kind, method)

    def changed(self: Any, hidden: mx.array) -> mx.array:
        change = _CHANGE.get()
        logits: mx.array = project(self, hidden if change is None else change(self, hidden))
        return logits

    return type(kind.__name__, (kind,), {method: changed, "unchanged": kind})
