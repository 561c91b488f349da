"""What nobody runs every day, benchmarks and examples, imports what there is, and makes its steps."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest

import ml
from benchmarks import put_get, start_forward

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


@pytest.mark.parametrize("framework", ["torch", "mlx"])
@pytest.mark.parametrize("case", [{"grow": True}, {"grow": False}, {"window": 8}], ids=str)
def test_steps_of_put_and_get_follow_one_another(framework: str, case: dict[str, Any]) -> None:
    pytest.importorskip("mlx.core" if framework == "mlx" else framework)
    backend, on = put_get.opened(framework)
    steps = on.decoding(backend, 16, 1, ml.DType.F32, **case)
    for _ in range(3):
        steps.prepare()
        steps.call()
        steps.finish()


def test_planning_a_pass_is_timed_for_each_case() -> None:
    rows = [*start_forward.run(True, "numpy")]
    assert len({(row.group, row.measurement) for row in rows}) == len(rows) > 10
    assert all(row.median > 0 for row in rows)
