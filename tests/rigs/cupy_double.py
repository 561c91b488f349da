"""The CuPy backend on the double of CuPy (fake_cupy.py): ``module`` is backends.cupy.backend made with it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import backends.cupy

from . import fake_cupy as double

OURS = ("devices", "products", "tensor", "ragged", "transfer", "backend")


def load_backend() -> ModuleType:
    """backends.cupy.backend as it is where ``import cupy`` gives the double; nothing of it stays behind."""
    found = double.modules()
    names = [name for name in sys.modules if name.split(".")[0] in ("cupy", "cupyx")]
    names += [f"backends.cupy.{name}" for name in OURS]
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.modules.update(found)
    try:
        return importlib.import_module("backends.cupy.backend")
    finally:
        for name in (*found, *(f"backends.cupy.{name}" for name in OURS)):
            sys.modules.pop(name, None)
        sys.modules.update(before)
        for name in OURS:
            vars(backends.cupy).pop(name, None)
            if f"backends.cupy.{name}" in before:
                setattr(backends.cupy, name, before[f"backends.cupy.{name}"])


def fails(error: str) -> Callable[[], Any]:
    def call() -> Any:
        raise RuntimeError(error)

    return call


module: Any = load_backend()
CUPY: Any = double.modules()["cupy"]
