"""docs/writing-a-store.md: its store is that of the examples, which passes the suite; its example runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from kvcache import stores
from kvcache.stores import SnapshotStore, StoreError
from kvcache.stores.plugins import StoreRegistry

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "writing-a-store.md").read_text(encoding="utf-8")
SHOWN = re.findall(r'^```\w+ title="([\w.]+)"\n(.*?)^```', TEXT, re.DOTALL | re.MULTILINE)
EXAMPLE = ROOT / "examples" / "kvcache-store-sqlite"


def test_the_store_of_the_guide_passes_the_suite_and_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugins: Any
) -> None:
    files = {path.name: path.read_text(encoding="utf-8") for path in EXAMPLE.glob("*.*")}
    assert files.keys() == {name for name, _ in SHOWN}
    assert all(text in files[name] for name, text in SHOWN)
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"],
        cwd=tmp_path, env={**clean, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"\d\d passed", done.stdout)
    plugins.install(tmp_path)
    monkeypatch.syspath_prepend(plugins.path)
    (point,) = entry_points(group="kvcache.stores", name="sqlite")
    registry = StoreRegistry([point])
    store: Any = registry.open(f"sqlite:{tmp_path}/kv.db?budget=1KiB", {})
    assert store.put("a", [b"x"])
    assert store.budget == 1024
    store.close()


def test_the_first_example_of_the_guide_runs() -> None:
    example = re.search(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    assert example is not None
    exec(compile(example.group(1), "docs/writing-a-store.md", "exec"), {})


def test_every_call_and_error_is_in_the_guide() -> None:
    calls = [name for name in vars(SnapshotStore) if not name.startswith("_")]
    assert calls
    assert [name for name in calls if f"`{name}(" not in TEXT] == []
    errors = [name for name in stores.__all__ if isinstance(getattr(stores, name), type)]
    assert [
        name for name in errors if issubclass(getattr(stores, name), StoreError) and name not in TEXT
    ] == []
