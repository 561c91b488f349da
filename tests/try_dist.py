"""Try the built distribution as its users get it: in an empty environment, away from the checkout.

``make dist`` runs this after it has built ``dist/``. It needs the package registry, and nothing of the
environment that it runs in but Python itself:

1. the wheel alone brings NumPy, ml_dtypes and pluggy only; a cache works; the command says what it needs;
2. with ``[engine]`` the command generates text with the bundled model;
3. with ``[testing]`` the shipped suites run, on the installed files;
4. pytest in a project that has an ``ml`` of its own runs as if this were not installed;
5. a type checker sees the types;
6. the source distribution holds what the wheel and the tests are made from, and no test data of others.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

DIST = Path(__file__).resolve().parents[1] / "dist"
MYPY = "mypy==2.4.1"
CORE = {"ml_kvcache", "ml_dtypes", "numpy", "pluggy"}

CACHE = """
import sys
import ml
import kvcache
from kvcache import Batch, CausalCache
with ml.open_backend() as backend, backend.new_context() as ctx:
    cache = CausalCache()
    cache.init(backend, ml.DType.F32, max_sequences=1, capacity=8, max_batch=4)
    cache.start_forward(ctx, Batch(positions=[0, 1], sequences=[0, 0]))
    token = ctx.full((2, 2, 4), 1.0, ml.DType.F32)
    cache.set_layer(0)
    cache.put(ctx, token, token)
    key, value, mask = cache.get(ctx)
    assert key.shape == (2, 2, 4), key.shape
    cache.close()
for module in (ml, kvcache):
    assert "site-packages" in module.__file__, module.__file__
assert not {"torch", "mlx", "cupy", "typer", "rich"} & set(sys.modules)
print("a cache on", backend.name)
"""

PROJECT = """
import sys
import ml

def test_theirs():
    assert ml.THEIRS
    assert not {"kvcache", "backends", "numpy"} & set(sys.modules)
"""

TYPED = """
import ml
from kvcache import Batch, CausalCache

def last_keys(backend: ml.Backend, cache: CausalCache) -> tuple[int, ...]:
    with backend.new_context() as ctx:
        cache.start_forward(ctx, Batch(positions=[0], sequences=[0]))
        key, _, _ = cache.get(ctx)
        reveal_type(key)
        return key.shape

last_keys("numpy", CausalCache())
"""


def main() -> None:
    (wheel,) = DIST.glob("*.whl")
    (source,) = DIST.glob("*.tar.gz")
    _check_source(source)
    with tempfile.TemporaryDirectory(prefix="ml-kvcache-") as folder:
        place = Path(folder)
        environment = Environment(place)
        environment.install(str(wheel))
        _check_core(environment)
        environment.install(f"{wheel}[engine]")
        _check_command(environment)
        environment.install(f"{wheel}[testing]")
        _check_suites(environment)
        _check_project(environment)
        environment.install(MYPY)
        _check_types(environment)
    print("the distribution works in an empty environment")


class Environment:
    """A virtual environment, and an empty folder from which its programs are run."""

    def __init__(self, place: Path) -> None:
        venv.create(place / "venv", with_pip=True)
        self.bin = place / "venv" / "bin"
        self.folder = place / "elsewhere"
        self.folder.mkdir()

    def install(self, requirement: str) -> None:
        self.run("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", requirement)

    def run(self, program: str, *arguments: str, code: int = 0) -> str:
        """What it printed. Ends the check where the exit status is another."""
        print("$", program, *("..." if "\n" in word else word for word in arguments), flush=True)
        found = subprocess.run(
            [str(self.bin / program), *arguments],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        said = found.stdout + found.stderr
        if found.returncode != code:
            raise SystemExit(f"{said}\nexit status {found.returncode}, not {code}")
        return said


def _expect(said: str, *parts: str) -> None:
    if missing := [part for part in parts if part not in said]:
        raise SystemExit(f"{said}\nwithout {missing}")


def _check_source(source: Path) -> None:
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = [
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "Makefile",
        "tests/conftest.py",
        "ml/py.typed",
    ]
    _expect("\n".join(sorted(names)), *wanted, "kvcache_engine/tiny/", "docs/index.md", "examples/own_loop")
    weights = {name for name in names if name.endswith((".safetensors", ".gguf", ".bin", ".npz"))}
    if foreign := sorted(name for name in weights if not name.startswith("kvcache_engine/tiny/")):
        raise SystemExit(f"the source distribution carries {foreign}")


def _check_core(environment: Environment) -> None:
    frozen = environment.run("python", "-m", "pip", "freeze", "--exclude", "pip", "--exclude", "setuptools")
    names = {line.replace("-", "_").split(" ")[0].split("==")[0] for line in frozen.splitlines()}
    if names != CORE:
        raise SystemExit(f"the wheel brought {sorted(names)}; it should be {sorted(CORE)}")
    _expect(environment.run("python", "-c", CACHE), "a cache on numpy")
    _expect(environment.run("kvcache", "backends", code=1), "pip install 'ml-kvcache[engine]'")


def _check_command(environment: Environment) -> None:
    _expect(environment.run("kvcache", "backends"), "numpy", "torch")
    said = environment.run(
        "kvcache", "generate", "--prompt", "In the beginning God created", "--max-tokens", "8"
    )
    _expect(said, "In the beginning God created")


def _check_suites(environment: Environment) -> None:
    suites = (
        "--pyargs",
        "ml.testing",
        "kvcache.testing",
        "--ml-backend=numpy",
        "-q",
        "-p",
        "no:cacheprovider",
    )
    said = environment.run("python", "-m", "pytest", *suites)
    _expect(said, " passed")
    print(said.strip().splitlines()[-1])


def _check_project(environment: Environment) -> None:
    theirs = environment.folder / "ml"
    theirs.mkdir()
    (theirs / "__init__.py").write_text("THEIRS = True\n")
    (environment.folder / "test_theirs.py").write_text(PROJECT)
    _expect(environment.run("python", "-m", "pytest", "-W", "error", "test_theirs.py"), "1 passed")
    said = environment.run("python", "-c", "import kvcache", code=1)
    _expect(said, "ImportError: kvcache: Python finds 'ml' at", str(theirs))
    shutil.rmtree(theirs)


def _check_types(environment: Environment) -> None:
    (environment.folder / "user.py").write_text(TYPED)
    said = environment.run("python", "-m", "mypy", "--strict", "user.py", code=1)
    _expect(
        said,
        'note: Revealed type is "ml.protocols.Tensor"',
        'has incompatible type "str"; expected "Backend"',
    )
    _expect(said, "Found 1 error in 1 file")


if __name__ == "__main__":
    sys.exit(main())
