"""Discovery as a person sees it: installed plugins, whole and broken, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

HEAD = """
from ml import Availability, BackendSpec, CacheConfig, DeviceInfo, DType, Features, hookimpl
from ml.base import BaseBackend

class Opened(BaseBackend):
    def __init__(self, name, device="cpu", **options):
        super().__init__(name, (DeviceInfo(device, device),), **options)
    def _new_context(self, max_graph_nodes):
        raise NotImplementedError
    def cache_config(self):
        return CacheConfig()

class Unmetered(Opened):
    def memory(self):
        raise OSError("the meter is broken")

def well():
    return Availability(True, version="1.2.3", devices=("cpu", "npu"))

def record(name, priority, probe=well, open=None):
    return BackendSpec(name, priority, (), f"pip install {name}", probe,
                       open or (lambda **options: Opened(name, **options)),
                       Features({DType.F32, DType.I32, DType.I64, DType.BOOL}, frozenset({"compute"})))

def fail(**options):
    raise RuntimeError("it went up in smoke")
"""

HOOK = "\n@hookimpl\ndef ml_backend():\n    return "

PLUGINS = {
    "whole": HEAD + HOOK + "record('whole', 900)",
    "second": HEAD + HOOK + "record('second', 800)",
    "missing": "import a_framework_that_is_not_there",
    "exits": "raise SystemExit('no licence')",
    "hook": HEAD + HOOK + "fail()",
    "nothing": HEAD + HOOK + "None",
    "hookless": "x = 1",
    "unmarked": HEAD + HOOK.replace("@hookimpl", "") + "record('unmarked', 1)",
    "untyped": HEAD + HOOK + "record('untyped', 'high')",
    "misspelt": HEAD + "\n@hookimpl\ndef ml_backends():\n    return record('misspelt', 1)",
    "probe": HEAD + HOOK + "record('probe', 990, probe=fail)",
    "probes_badly": HEAD + HOOK + "record('probes_badly', 980, probe=lambda: True)",
    "absent": HEAD + HOOK + "record('absent', 970, probe=lambda: Availability(False, 'no such chip'))",
    "open": HEAD + HOOK + "record('open', 1000, open=fail)",
    "memory": HEAD + HOOK + "record('memory', 890, open=lambda **options: Unmetered('memory', **options))",
    "twin": HEAD + HOOK + "record('twin', 1000)",
    "twin_too": HEAD + HOOK + "record('twin', 1)",
}
"""Modules by the name of their entry point."""


def install(folder: Path, *names: str) -> None:
    """What ``pip install`` leaves behind: a module, and a dist-info that names its entry point."""
    for name in names:
        (folder / f"plugin_{name}.py").write_text(PLUGINS[name], encoding="utf-8")
        info = folder / f"plugin_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: plugin-{name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[ml.backends]\n{name} = plugin_{name}\n")


def hide(folder: Path, *frameworks: str) -> None:
    """As on a machine that has none of them, where nothing waits for their imports."""
    for name in frameworks:
        (folder / f"{name}.py").write_text("raise ModuleNotFoundError(f'No module named {__name__!r}')\n")


def run(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key != "ML_BACKEND"}
    path = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", *command],
        env={**clean, "PYTHONPATH": path, **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def ask(folder: Path, code: str, **environment: str) -> Any:
    """The value of ``answer`` after ``code``; an ml error becomes [its class, its message]."""
    program = (
        "import json, ml\n"
        "try:\n" + "".join(f"    {line}\n" for line in code.splitlines()) + "except ml.MLError as error:\n"
        "    answer = [type(error).__name__, str(error)]\n"
        "print(json.dumps(answer))"
    )
    done = run(folder, "-c", program, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


EVERYTHING = """
def attempt(*name):
    try:
        with ml.open_backend(*name) as backend:
            return [backend.name, backend.devices[0].name]
    except ml.MLError as error:
        return [type(error).__name__, str(error)]
rows = {row.name: [row.available, row.reason, row.version, row.devices, row.priority, row.install_hint]
        for row in ml.available_backends()}
answer = [rows, attempt(), {name: attempt(name) for name in rows if name not in ("torch", "mlx", "cupy")}]
"""

BROKEN = {
    "missing": "ModuleNotFoundError: No module named 'a_framework_that_is_not_there'",
    "exits": "SystemExit: no licence",
    "hook": "RuntimeError: it went up in smoke",
    "nothing": "it must return one ml.BackendSpec",
    "hookless": "it has no ml_backend(); define that function, decorated with @ml.hookimpl",
    "misspelt": "it has no ml_backend()",
    "unmarked": "its ml_backend() has no @hookimpl",
    "untyped": "BackendSpec: priority='high'; it must be a whole number",
    "twin": "provided twice, by twin and by twin_too",
    "probe": "its probe raised RuntimeError: it went up in smoke",
    "probes_badly": "its probe returned True",
    "absent": "no such chip",
}
"""The plugins that cannot be used, and what has to be said of each."""
BROKEN_SHOWN = ("it went up in smoke", "no such chip", "a_framework_that_is_not_there")


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One process in which every broken plugin is installed beside two whole ones."""
    folder = tmp_path_factory.mktemp("crowd")
    hide(folder, "torch", "cupy")
    install(folder, "whole", "second", "twin_too", *BROKEN)
    return ask(folder, EVERYTHING)


def test_an_installed_plugin_is_listed_with_all_that_it_says(crowd: Any) -> None:
    rows, _, _ = crowd
    assert rows["whole"] == [True, "", "1.2.3", ["cpu", "npu"], 900, "pip install whole"]
    assert list(rows)[:2] == ["whole", "second"], "the highest priority comes first"
    available = [row[0] for row in rows.values()]
    assert available == sorted(available, reverse=True), "what can run comes first"


@pytest.mark.parametrize(("name", "reason"), BROKEN.items())
def test_a_broken_plugin_is_named_with_its_error(crowd: Any, name: str, reason: str) -> None:
    rows, _, opened = crowd
    assert rows[name][0] is False
    assert reason in rows[name][1]
    kind, message = opened[name]
    assert kind in ("BackendNotFoundError", "BackendUnavailableError", "PluginError")
    assert name in message
    assert reason in message


def test_broken_plugins_hide_no_other(crowd: Any) -> None:
    rows, best, opened = crowd
    assert best == ["whole", "cpu"]
    assert {name for name, row in rows.items() if row[0]} >= {"whole", "second", "numpy"}
    assert [opened[name][0] for name in ("whole", "second", "numpy")] == ["whole", "second", "numpy"]


def test_the_command_shows_all_of_them(tmp_path: Path) -> None:
    pytest.importorskip("typer")
    hide(tmp_path, "torch", "cupy")
    install(tmp_path, "whole", "probe", "missing", "absent", "open", "memory")
    done = run(tmp_path, "-m", "kvcache_engine", "backends")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for shown in (
        "whole  1.2.3, priority 900",
        "  devices       cpu, npu",
        "  memory        cpu: unknown",
        "open  1.2.3, priority 1000, failed to open",
        "  why           open_backend: 'open' failed to open: RuntimeError: it went up in smoke",
        "memory  1.2.3, priority 890, failed to open",
        "  why           OSError: the meter is broken",
        "absent  priority 970, cannot run here",
        "  why           no such chip",
        "  install       pip install absent",
    ):
        assert shown in lines, f"{shown!r} is not in\n{done.stdout}"
    assert any(line.startswith("numpy  ") for line in lines)
    assert all(shown in done.stdout for shown in BROKEN_SHOWN)


def test_the_command_tells_all_of_it_as_json(tmp_path: Path) -> None:
    pytest.importorskip("typer")
    hide(tmp_path, "torch", "cupy")
    install(tmp_path, "whole", "open", "missing")
    done = run(tmp_path, "-m", "kvcache_engine", "backends", "--json")
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    whole = rows["whole"]
    assert whole["capabilities"] == ["SupportsCacheConfig"]
    assert whole["memory"] == [{"device": "cpu", "allocated": 0, "free": None, "total": None}]
    assert (whole["dtypes"], whole["absent"], whole["error"]) == (
        ["F32", "I32", "I64", "BOOL"],
        ["compute"],
        "",
    )
    assert "it went up in smoke" in rows["open"]["error"]
    assert rows["open"]["memory"] == rows["missing"]["dtypes"] == []
    assert rows["missing"]["available"] is False
