"""Projects of others, beside which this distribution is installed: left alone, or told what is in the way."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ml_kvcache import hidden

THEIRS = {
    "ml, a package": "ml/__init__.py",
    "ml, a module": "ml.py",
    "backends, a package": "backends/__init__.py",
    "backends, a module": "backends.py",
    "backends with numpy": "backends/numpy/__init__.py",
    "kvcache, a package": "kvcache/__init__.py",
    "nothing of ours": "app.py",
}
"""The file of a project that has a name of ours."""

TEST = """
import sys
import pytest

def test_theirs_is_what_is_imported(request):
    import {name}
    assert {name}.THEIRS

def test_nothing_of_ours_is_loaded_that_was_not_asked_for():
    tops = {{"ml", "kvcache", "kvcache_engine", "backends", "numpy", "ml_dtypes"}}
    loaded = {{name: module for name, module in sys.modules.items() if name.split(".")[0] in tops}}
    assert {{name for name, module in loaded.items() if not hasattr(module, "THEIRS")}} == set()

def test_the_plugin_is_the_one_that_is_installed(pytestconfig):
    assert pytestconfig.getoption("--ml-backend") is None
"""

Project = Callable[[str], Path]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    def make(which: str) -> Path:
        file = tmp_path / THEIRS[which]
        file.parent.mkdir(parents=True, exist_ok=True)
        for folder in file.relative_to(tmp_path).parents[:-1]:
            (tmp_path / folder / "__init__.py").write_text("THEIRS = True\n")
        file.write_text("THEIRS = True\n")
        name = file.relative_to(tmp_path).parts[0].removesuffix(".py")
        (tmp_path / "test_theirs.py").write_text(TEST.format(name=name))
        (tmp_path / "pytest.ini").write_text(
            "[pytest]\nfilterwarnings = error\naddopts = -p no:cacheprovider\n"
        )
        return tmp_path

    return make


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in that folder, which ``-m`` and ``-c`` put first on its path."""
    clean = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "ML_", "PYTHONP"))
    }
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=clean, capture_output=True, text=True, check=False
    )


def test_what_hides_a_package_is_found_without_importing_it(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hidden("ml") == hidden("kvcache") == hidden("not_there_at_all") == ""
    home = project("backends, a module")
    monkeypatch.syspath_prepend(home)
    monkeypatch.delitem(sys.modules, "app", raising=False)
    (home / "linked").symlink_to(home)
    (home / "app.py").write_text("raise RuntimeError")
    assert hidden("app", home) == hidden("app", home / "linked") == ""
    (other := home / "other").mkdir()
    assert hidden("app", other) == "", "none is there to be hidden"
    (other / "app.py").touch()
    assert f"finds 'app' at {home / 'app.py'}, which hides the one at {other / 'app'}" in hidden("app", other)
    assert "app" not in sys.modules


@pytest.mark.parametrize("which", ["ml, a module", "backends with numpy", "nothing of ours"])
def test_pytest_in_a_project_of_others_runs_as_if_we_were_not_installed(project: Project, which: str) -> None:
    done = run(project(which), "-m", "pytest", "-q", "-p", "no:hypothesispytest", "-p", "no:anyio")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


@pytest.mark.parametrize("which", [name for name in THEIRS if name.startswith(("ml", "kvcache"))])
def test_a_suite_that_is_hidden_is_a_usage_error_that_names_what_hides_it(
    project: Project, which: str
) -> None:
    folder = project(which)
    done = run(folder, "-m", "pytest", "--pyargs", "ml.testing", "kvcache.testing", "--ml-backend=numpy")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout + done.stderr
    assert f"at {folder / THEIRS[which].split('/')[0]}, which hides the one at" in done.stderr


@pytest.mark.parametrize(
    ("which", "code"),
    [
        ("ml, a package", "from kvcache import CausalCache"),
        ("ml, a module", "import kvcache.caches.causal"),
        ("ml, a module", "import ml, kvcache"),
    ],
)
def test_kvcache_says_which_ml_hides_ours(project: Project, which: str, code: str) -> None:
    folder = project(which)
    done = run(folder, "-c", code)
    where = folder / THEIRS[which].split("/")[0]
    (error,) = done.stderr.splitlines()[-1:]
    assert error.startswith(f"ImportError: kvcache: Python finds 'ml' at {where}, which hides the one at ")
    assert "rename that of the project, or run where it is not on sys.path" in error


@pytest.mark.parametrize("which", [name for name in THEIRS if name.startswith(("ml", "kvcache"))])
def test_the_command_says_what_hides_a_package(project: Project, which: str) -> None:
    folder = project(which)
    done = run(folder, "-c", "import kvcache_engine.command.main")
    where = folder / THEIRS[which].split("/")[0]
    assert f"ImportError: kvcache_engine: Python finds {where.stem!r} at {where}, which hides" in done.stderr


EVERY_WAY = """
import ml
for row in ml.available_backends():
    print(row.name, row.available, row.reason)
for way, names in (("named", ["numpy"]), ("any", [])):
    try:
        print(way, ml.open_backend(*names))
    except ml.MLError as error:
        print(way, False, *str(error).splitlines())
"""


@pytest.mark.parametrize("which", [name for name in THEIRS if name.startswith("backends")])
def test_a_backend_says_which_backends_hides_ours(project: Project, which: str) -> None:
    folder = project(which)
    hidden = f"Python finds 'backends' at {folder / THEIRS[which].split('/')[0]}, which hides the one at "
    lines = run(folder, "-c", EVERY_WAY).stdout.splitlines()
    assert [line.split()[1] for line in lines] == ["False"] * len(lines)
    assert [line for line in lines if hidden not in line] == []
    assert {"named", "any", "numpy"} <= {line.split()[0] for line in lines}


def test_what_was_imported_before_pytest_is_no_error(project: Project) -> None:
    code = "import ml, kvcache, backends, pytest, sys; sys.exit(pytest.main(['-q', '--collect-only']))"
    done = run(project("nothing of ours"), "-c", code)
    assert done.returncode == 0, done.stdout + done.stderr


OWN = """
from ml.testing import BackendTests
from ml.testing.order import OrderTests
from kvcache.testing import CacheTests

class TestMine(BackendTests):
    backend_name = "numpy"

class TestCaches(CacheTests):
    backend_name = "numpy"

class TestOrder(OrderTests):
    backend_name = "numpy"

def test_assertions_of_the_suites_are_readable():
    import sys
    for name in ("ml.testing.aliasing", "ml.testing.order", "kvcache.testing.suites.masks"):
        assert "assertion.rewrite" in type(sys.modules[name].__loader__).__module__
"""


def test_a_project_with_a_backend_runs_the_suites_as_its_own_tests(project: Project) -> None:
    folder = project("nothing of ours")
    (folder / "test_mine.py").write_text(OWN)
    done = run(folder, "-m", "pytest", "-q", "test_mine.py", "-k", "outlive or readable or capacity_of")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_the_command_runs_the_suites_where_a_project_has_names_of_ours(project: Project) -> None:
    pytest.importorskip("typer")
    folder = project("ml, a package")
    start = [
        "-P",
        "-m",
        "kvcache_engine",
        "conformance",
        "--backend",
        "numpy",
        "--suite",
        "ml",
        "-k",
        "outlive",
    ]
    done = run(folder, *start)
    assert done.returncode == 0, done.stdout + done.stderr
