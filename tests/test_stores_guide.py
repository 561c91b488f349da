"""docs/writing-a-store.md is run as it stands: its store passes the suite, its example runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from kvcache import stores
from kvcache.stores import SnapshotStore, StoreError

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "writing-a-store.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r'^```python title="([\w.]+)"\n(.*?)^```', TEXT, re.DOTALL | re.MULTILINE))

USE = """
from kvcache.stores.plugins import StoreRegistry
import kvcache_store_sqlite
registry = StoreRegistry([])
registry.register(kvcache_store_sqlite)
store = registry.open("sqlite:kv.db?budget=1KiB", {})
assert store.put("a", [b"x"]) and store.budget == 1024
store.close()
"""


def run(folder: Path, *command: str) -> str:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment = {**clean, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def test_the_store_of_the_guide_passes_the_suite_and_is_found(tmp_path: Path) -> None:
    assert FILES.keys() == {"kvcache_store_sqlite.py", "test_sqlite_store.py"}
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    printed = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    assert re.search(r"\d\d passed in", printed), printed
    run(tmp_path, "-c", USE)


def test_the_first_example_of_the_guide_runs(tmp_path: Path) -> None:
    example = re.search(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    assert example is not None
    run(tmp_path, "-c", example.group(1))


def test_every_call_and_error_is_in_the_guide() -> None:
    calls = [name for name in vars(SnapshotStore) if not name.startswith("_")]
    assert calls
    for name in calls:
        assert f"`{name}(" in TEXT
    errors = [name for name in stores.__all__ if isinstance(getattr(stores, name), type)]
    for name in errors:
        if issubclass(getattr(stores, name), StoreError):
            assert name in TEXT, name
