"""transformers' tests of caches and generation, with ours in the places of its DynamicCache and StaticCache.

A DynamicCache without a config finds its number of layers as it goes; ours are told it, from the same test's
run on transformers' own. The tests of generation that transformers mixes into those of each model run on a
small model of each of ``GENERATING``.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import importlib
import sys
import unittest
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import transformers
from transformers.integrations import executorch

from benchmarks.census import transformers_types
from benchmarks.peers_tests import SHAPE, imported_from, load, named, tokenizer
from kvcache import NotSupportedError
from kvcache.integrations.transformers import HFCache, HFStaticCache, install

GENERATING = ("llama", "gemma3_text", "qwen3_next")
"""Full attention, windows beside it, and states beside it."""
LEFT_OUT = {
    "test_*compil*": "compiles a model for minutes on a CPU; tests/integrations/transformers compile ours",
    "test_*_quant_cache": "asks for a kind of cache that ours does not stand in for",
    "test_torch_export*": "is of the exporter; test_executorch.py exports our static cache",
    "test_onnx_export*": "is of the exporter",
}
"""Patterns of tests that are not run, and why."""

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
        count = len(data) or (len(_layers.pop(0).layers) if _layers and config is None else 1)
        cache = HFCache(config or _plain(count), grow=True, **options)
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


class _Counting(metaclass=_StandIn):
    """transformers' DynamicCache; those without a config are noted."""

    kind = transformers.DynamicCache

    @staticmethod
    def make(*arguments: Any, **options: Any) -> Any:
        cache = transformers.DynamicCache(*arguments, **options)
        if not arguments and options.get("config") is None:
            _layers.append(cache)
        return cache


def _plain(layers: int) -> Any:
    options = {"num_hidden_layers": layers, "eos_token_id": None, "initializer_range": 0.3}
    return transformers.LlamaConfig(**{**SHAPE, **options})


def theirs() -> contextlib.AbstractContextManager[None]:
    """transformers' own caches, noting how many layers those without a config come to have."""
    _layers.clear()
    return named(_modules, DynamicCache=_Counting)


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """Ours in the test files, in what exports models, and in generate()."""
    with install(), named([executorch], StaticCache=StaticCache):  # noqa: SIM117 - install() counts too
        with named(_modules, DynamicCache=DynamicCache, StaticCache=StaticCache):
            yield


def _model(*arguments: Any, **options: Any) -> Any:
    """In the place of AutoModelForCausalLM: a small model with the same random weights every time."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(_plain(SHAPE["num_hidden_layers"])).eval()


def _tokenizer(*arguments: Any, padding_side: str = "right", **options: Any) -> Any:
    return tokenizer(padding_side=padding_side)


class _Dropped:
    """A name that this version of transformers no longer has; what is decorated with it is skipped."""

    def __init__(self, name: str) -> None:
        self._told = f"transformers {transformers.__version__} has no {name}"

    def __call__(self, *arguments: Any) -> Any:
        if len(arguments) == 1 and callable(arguments[0]):
            return unittest.skip(self._told)(arguments[0])
        raise AttributeError(self._told)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(self._told)


def _dropped_names(path: Path) -> list[tuple[str, str]]:
    """What a file of another version imports and is there no more, as (module, name)."""
    wanted = [
        (str(node.module), alias.name)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers")
        for alias in node.names
    ]
    return [(module, name) for module, name in wanted if not hasattr(importlib.import_module(module), name)]


class _Tester:
    """What the mixed-in tests ask about a model."""

    batch_size, seq_length = 4, 7

    def __init__(self, config: Any) -> None:
        self.config = config

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(
            3, self.config.vocab_size, (self.batch_size, self.seq_length), generator=generator
        )
        return copy.deepcopy(self.config), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _add_cases(module: ModuleType) -> None:
    """Cases of the file's mixin, which by itself is none."""
    for label in GENERATING if hasattr(module, "GenerationTesterMixin") else ():
        model = transformers_types.build(label)
        members = {
            "model_tester": _Tester(model.config),
            "all_generative_model_classes": (type(model),),
            "has_attentions": True,
            "__module__": module.__name__,
        }
        setattr(module, label, type(label, (module.GenerationTesterMixin, unittest.TestCase), members))


def _load(path: Path) -> ModuleType:
    # Some imports put a new module in transformers' place: look at all of them before any is given a name.
    missing = _dropped_names(path)
    for module, name in missing:
        setattr(sys.modules[module], name, _Dropped(name))
    try:
        with imported_from(next(folder.parent for folder in path.parents if folder.name == "tests")):
            module = load(path)
        _add_cases(module)
        return module
    finally:
        for module, name in missing:
            delattr(sys.modules[module], name)


@contextlib.contextmanager
def prepared(paths: Sequence[Path]) -> Iterator[tuple[list[ModuleType], Counter[str]]]:
    """Counts what is made, by generate() too."""
    with contextlib.ExitStack() as places:
        for kind in (HFCache, HFStaticCache):
            places.callback(setattr, kind, "__init__", kind.__init__)
            kind.__init__ = _counted(kind.__name__, kind.__init__)  # type: ignore[method-assign]
        _modules[:] = map(_load, paths)
        stand_ins = {"AutoModelForCausalLM": _model, "AutoTokenizer": _tokenizer}
        made = {name: SimpleNamespace(from_pretrained=make) for name, make in stand_ins.items()}
        places.enter_context(named(_modules, **made))
        yield _modules, _used


def _counted(name: str, plain: Any) -> Any:
    @functools.wraps(plain)
    def counted(self: Any, *arguments: Any, **options: Any) -> None:
        plain(self, *arguments, **options)
        _used[name] += 1

    return counted
