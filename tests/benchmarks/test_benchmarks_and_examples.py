"""What nobody runs every day, benchmarks and examples, imports what there is."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("ml", "ml_kvcache", "kvcache", "kvcache_engine", "backends", "benchmarks", "examples")


def is_there(module: str, name: str) -> bool:
    try:
        if hasattr(importlib.import_module(module), name):
            return True
        importlib.import_module(f"{module}.{name}")
    except ImportError as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        return missing is None or missing.split(".")[0] not in OURS  # a framework is not installed
    return True


@pytest.mark.parametrize("folder", ["benchmarks", "examples"])
def test_each_import_of_ours_is_there(folder: str) -> None:
    wanted = {
        (node.module, name.name)
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OURS
        for name in node.names
    }
    assert len(wanted) > 40
    assert [f"{module}: {name}" for module, name in sorted(wanted) if not is_there(module, name)] == []
