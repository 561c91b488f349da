"""transformers' tests of its caches, with ours in the places of its DynamicCache and StaticCache.

A DynamicCache without a config finds its number of layers as it goes; ours are told it, from the same test's
run on transformers' own. Models and tokenizers, which the files download, are small ones with random weights
here: what asks for the text of a real one fails on transformers' own caches too, and is listed as that.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.util
import sys
import unittest
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from transformers.integrations import executorch

from benchmarks.peers_models import SHAPE, tokenizer
from kvcache import NotSupportedError
from kvcache.integrations.transformers import HFCache, HFStaticCache, install

__all__ = ["ours", "prepared", "theirs"]

_used: Counter[str] = Counter()
_modules: list[ModuleType] = []
_layers: list[Any] = []
"""The caches that the run on transformers' own has made without a config, in order."""


class _StandIn(type):
    """A name that makes objects of the class ``kind``, and passes for it."""

    kind: type

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        return cls.make(*arguments, **options)  # type: ignore[attr-defined]

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.kind)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.kind, name)


class DynamicCache(metaclass=_StandIn):
    kind = HFCache

    @staticmethod
    def make(ddp_cache_data: Any = None, config: Any = None, offloading: bool = False, **options: Any) -> Any:
        if offloading:
            raise NotSupportedError("DynamicCache(offloading=True): HFCache(backend='numpy')")
        data = list(ddp_cache_data or ())
        cache = HFCache(config or _plain(len(data) or _counted()), grow=True, **options)
        for layer, found in enumerate(data):
            cache.update(found[0], found[1], layer)
        return cache


class StaticCache(metaclass=_StandIn):
    kind = HFStaticCache

    @staticmethod
    def make(config: Any, max_cache_len: int, offloading: bool = False, **legacy: Any) -> Any:
        if offloading:
            raise NotSupportedError("StaticCache(offloading=True)")
        return HFStaticCache(config.get_text_config(decoder=True), capacity=max_cache_len)


def _counted() -> int:
    """How many layers the cache made at this place had on transformers' own."""
    return len(_layers.pop(0).layers) if _layers else 1


def _plain(layers: int) -> Any:
    options = {"num_hidden_layers": layers, "eos_token_id": None, "initializer_range": 0.3}
    return transformers.LlamaConfig(**{**SHAPE, **options})


class _Counting(metaclass=_StandIn):
    """transformers' DynamicCache; those without a config are noted."""

    kind = transformers.DynamicCache

    @staticmethod
    def make(*arguments: Any, **options: Any) -> Any:
        cache = transformers.DynamicCache(*arguments, **options)
        if not arguments and options.get("config") is None:
            _layers.append(cache)
        return cache


@contextlib.contextmanager
def theirs() -> Iterator[None]:
    """transformers' own caches, noting how many layers those without a config come to have."""
    _layers.clear()
    with _named(DynamicCache=_Counting, StaticCache=transformers.StaticCache):
        yield


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """Ours in the test files, in what exports models, and in generate()."""
    exported = executorch.StaticCache
    executorch.StaticCache = StaticCache  # type: ignore[misc]
    try:
        with install(), _named(DynamicCache=DynamicCache, StaticCache=StaticCache):
            yield
    finally:
        executorch.StaticCache = exported  # type: ignore[misc]


@contextlib.contextmanager
def _named(**classes: Any) -> Iterator[None]:
    """The classes under these names in the test files."""
    for module in _modules:
        vars(module).update({name: found for name, found in classes.items() if hasattr(module, name)})
    yield


class _Models:
    """In the place of AutoModelForCausalLM: a small model with the same random weights every time."""

    @staticmethod
    def from_pretrained(*arguments: Any, **options: Any) -> Any:
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(_plain(SHAPE["num_hidden_layers"])).eval()


class _Tokenizers:
    """In the place of AutoTokenizer."""

    @staticmethod
    def from_pretrained(*arguments: Any, padding_side: str = "right", **options: Any) -> Any:
        return tokenizer(padding_side=padding_side)


class _Dropped:
    """A name that this version of transformers no longer has; what is decorated with it is skipped."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if len(arguments) == 1 and not options and callable(arguments[0]):
            return unittest.skip(f"{self.name} is not in transformers {transformers.__version__}")(
                arguments[0]
            )
        raise self._gone()

    def __getattr__(self, name: str) -> Any:
        raise self._gone()

    def _gone(self) -> AttributeError:
        return AttributeError(f"transformers {transformers.__version__} has no {self.name}")


@contextlib.contextmanager
def _names_that_a_file_asks_for(path: Path) -> Iterator[None]:
    """A file of another version imports what has been dropped since: give it something by that name."""
    wanted = [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers")
        for alias in node.names
    ]
    # Some imports put a new module in transformers' place: look at all of them before any is given a name.
    missing = [
        (module, name) for module, name in wanted if not hasattr(importlib.import_module(str(module)), name)
    ]
    for module, name in missing:
        setattr(sys.modules[str(module)], name, _Dropped(name))
    try:
        yield
    finally:
        for module, name in missing:
            delattr(sys.modules[str(module)], name)


def prepared(paths: list[Path]) -> tuple[list[ModuleType], Counter[str]]:
    """The test modules, and the count of what they make of ours."""
    for kind in (HFCache, HFStaticCache):
        _count(kind)
    _modules[:] = [_load(path) for path in paths]
    return _modules, _used


def _count(kind: type) -> None:
    """Count what is made, by generate() too."""
    plain: Any = kind.__init__

    @functools.wraps(plain)
    def counted(self: Any, *arguments: Any, **options: Any) -> None:
        plain(self, *arguments, **options)
        _used[kind.__name__] += 1

    kind.__init__ = counted  # type: ignore[misc]


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"peers_transformers_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    with _names_that_a_file_asks_for(path):
        spec.loader.exec_module(module)
    for name, stand_in in (("AutoModelForCausalLM", _Models), ("AutoTokenizer", _Tokenizers)):
        if hasattr(module, name):
            setattr(module, name, stand_in)
    return module
