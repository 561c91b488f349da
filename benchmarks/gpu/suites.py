"""Stages b and c: both shipped suites and the project's own test files, on PyTorch and on CuPy."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.record import ROOT, Stage, needs, needs_backend

GRACE = 30.0
"""Seconds in which pytest, once it is interrupted, writes what it has found."""


def torch_suites(stage: Stage) -> None:
    needs_backend("torch")
    _suites(stage, "torch")


def cupy_suites(stage: Stage) -> None:
    needs_backend("cupy")
    _suites(stage, "cupy")


def device_of(stage: Stage, backend: str) -> str:
    """The stage's device; CuPy, which has no CPU, takes a GPU whatever it is."""
    return "cuda" if backend == "cupy" and stage.options.device == "cpu" else stage.options.device


def _suites(stage: Stage, backend: str) -> None:
    command = ["--pyargs", "ml.testing", "kvcache.testing", f"--ml-backend={backend}"]
    command += ["--ml-backend-option", f"device={device_of(stage, backend)}"]
    _pytest(stage, "suites", [*command, *(["--ml-quick", "-k", "rows or layers"] if stage.quick else [])])


def torch_files(stage: Stage) -> None:
    needs_backend("torch")
    _files(stage, "torch")


def cupy_files(stage: Stage) -> None:
    """On the real CuPy where there is one, and on the double of it; the own loop of examples/ too."""
    _files(stage, "cupy")


def _files(stage: Stage, name: str) -> None:
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob(f"test_*{name}*.py"))
    if name == "cupy":
        files.append("tests/examples/test_example_own_loop.py")
    quick = [f"tests/backends/test_{name}.py", "-k", "close or probe"]
    _pytest(stage, "files", quick if stage.quick else files)


def _pytest(stage: Stage, name: str, arguments: Sequence[str]) -> None:
    """Run pytest in its own process. The log grows as it goes; junit comes when it ends, or is stopped."""
    needs("pytest", "hypothesis")
    junit, log = (stage.options.out / f"{stage.letter}-{name}.{end}" for end in ("xml", "log"))
    junit.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-W", "default", "--tb=short"]
    if importlib.util.find_spec("xdist"):
        processes = min(8, os.cpu_count() or 1)  # each has a context of the device
        command += ["-p", "no:xdist"] if stage.quick else ["-n", str(processes), "--dist", "worksteal"]
    command += [f"--junitxml={junit}", *arguments]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    stage.note("command", command)
    with open(log, "w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment | {"PYTHONUNBUFFERED": "1"}, stdout=output, stderr=output
        )
        try:
            code = process.wait(max(1.0, stage.left - GRACE))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            code = None
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
        finally:
            process.kill()
            process.wait()
    if not junit.is_file():
        end = log.read_text(encoding="utf-8")[-3000:]
        raise RuntimeError(f"pytest wrote no {junit.name} (exit code {code}; None: out of time):\n{end}")
    found = tally(junit)
    for key, value in found.items():
        stage.note(key, value)
    if code is None:
        raise TimeoutError(f"out of time after {found['tests']} tests; {log.name} names them")
    if code or not found["passed"]:
        raise AssertionError(f"pytest ended with {code}: {found['failed']} failed, {found['passed']} passed")


def tally(junit: Path) -> dict[str, object]:
    """How many tests ended how, and of each that failed its first line; of skips each reason."""
    cases = list(ElementTree.parse(junit).getroot().iter("testcase"))
    bad = [(case, part) for case in cases for part in (*case.findall("failure"), *case.findall("error"))]
    skips = [part.get("message", "") for case in cases for part in case.findall("skipped")]
    names = {
        f"{case.get('classname')}::{case.get('name')}": _first(part.get("message")) for case, part in bad
    }
    return {
        "tests": len(cases), "passed": len(cases) - len({id(case) for case, _ in bad}) - len(skips),
        "failed": len(names), "skipped": len(skips), "failures": names,
        "reasons of skips": {reason: skips.count(reason) for reason in sorted(set(skips))},
    }  # fmt: skip


def _first(message: str | None) -> str:
    return (message or "").partition("\n")[0][:300]


TORCH = {"shipped suites": torch_suites, "test files": torch_files}
CUPY = {"shipped suites": cupy_suites, "test files": cupy_files}
