"""Importing this puts empty modules in the place of torchvision, where it is not installed.

SGLang imports it for models that see pictures, and wheels of it fit PyTorch's CUDA builds only.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock


class _Nothing(ModuleType):
    """A module in which every name is there, and means nothing."""

    __path__ = ()
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _NoPictures(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Nothing(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


if importlib.util.find_spec("torchvision") is None:
    sys.meta_path.append(_NoPictures())
