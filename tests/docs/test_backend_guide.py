"""docs/writing-a-backend.md works as written: its files are written, its commands are run, in order."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import ml.base
from backends.numpy.backend import NumpyBackend, NumpyContext, NumpyTensor

from ..rigs.kept_programs import kept_programs

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "writing-a-backend.md"
FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
CONTINUED = " (continued)"
EXCERPT = "examples/"
SUITES = ("ml.testing", "kvcache.testing")
LONG = bool(os.environ.get("ML_LONG"))
SAMPLE = 1 if LONG else 30
"""Of the suites' tests every thirtieth, unless ML_LONG=1: what the guide shows is run but for two lines."""
TAKEN_OVER = f"""
from ml.testing import BackendTests

class TestCompiled(BackendTests):
    backend_name = "mine"
    case_stride = {1 if LONG else 12}
"""
"""Of what the recipe compiles, every twelfth case of a table, unless ML_LONG=1."""


class Block(NamedTuple):
    language: str
    title: str
    text: str


def blocks() -> list[Block]:
    """Those of the project that the guide builds; EXCERPT is of files that the repository has."""
    found = [Block(*block) for block in FENCE.findall(GUIDE.read_text(encoding="utf-8"))]
    return [block for block in found if not block.title.startswith(EXCERPT)]


def write(project: Path, block: Block) -> None:
    """A block with a title is that file; one that is continued is appended to it."""
    path = project / block.title.removesuffix(CONTINUED)
    path.parent.mkdir(exist_ok=True)
    before = path.read_text(encoding="utf-8") if block.title.endswith(CONTINUED) else ""
    path.write_text(before + block.text, encoding="utf-8")


def perform(project: Path, plugins: Any, command: str) -> None:
    program, *arguments = shlex.split(command)
    if program == "pip":
        assert arguments == ["install", "-e", "."]
        plugins.install(project)
    elif program == "kvcache":
        rows = plugins.run([sys.executable, "-m", "kvcache_engine", *arguments]).splitlines()
        assert any(row.startswith("put + get of 1 after 8192") and "x floor" in row for row in rows)
    else:
        assert program == "pytest"
        assert " passed" in plugins.run([sys.executable, "-m", program, *arguments], sample=SAMPLE)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, plugins: Any) -> Path:
    """The folder that one has who followed the guide, with its plugin installed in ``plugins``."""
    folder, commands = tmp_path_factory.mktemp("guide"), 0
    for block in blocks():
        if block.title:
            write(folder, block)
            if commands:  # installed in place, as -e does: later files are seen without another pip
                write(plugins.path, block)
        elif block.language == "sh":
            for command in block.text.splitlines():
                perform(folder, plugins, command)
                commands += 1
    assert commands
    return folder


def test_the_guide_leads_from_nothing_to_green(project: Path, plugins: Any) -> None:
    collected = plugins.run([sys.executable, "-m", "pytest", "tests", "--collect-only"], cwd=project)
    assert "TestMine" in collected
    assert "TestCaches" in collected


@pytest.mark.parametrize(
    "chosen",
    [
        ("--pyargs", *SUITES, "--ml-backend=mine", "--ml-quick"),
        ("test_compiled.py", "-k=attention or sinks or hands_them or rows_are_multiplied"),
    ],
    ids=["the quick part", "what is compiled"],
)
def test_the_recipe_for_frameworks_that_compile_is_green(
    project: Path, plugins: Any, tmp_path: Path, chosen: tuple[str, ...]
) -> None:
    pytest.importorskip("jax")
    (plugins.path / "test_compiled.py").write_text(TAKEN_OVER, encoding="utf-8")
    record = plugins.path / "ml_backend_mine" / "__init__.py"
    text = record.read_text(encoding="utf-8")
    changed = text.replace("_mine.backend", "_mine.compiled").replace("MineBackend", "CompiledBackend")
    assert changed != text
    record.write_text(changed, encoding="utf-8")
    try:
        with kept_programs(tmp_path):
            assert " passed" in plugins.run([sys.executable, "-m", "pytest", *chosen])
    finally:
        record.write_text(text, encoding="utf-8")


OUT_OF_MEMORY = """
import types
import ml
from ml.base import translating
from ml_backend_mine import tensor

def failing(self, *arguments, **options):
    raise MemoryError("4 TiB")

hooks = [name for name, value in vars(tensor.MineTensor).items()
         if isinstance(value, (types.FunctionType, property)) and not name.startswith("__")]
assert len(hooks) > 10
Failing = translating(MemoryError)(type("Failing", (tensor.MineTensor,), {"__slots__": (), **{
    name: property(named) if isinstance(vars(tensor.MineTensor)[name], property) else named
    for name in hooks for named in [types.FunctionType(failing.__code__, globals(), name)]}}))
with ml.open_backend("mine") as backend, backend.new_context() as ctx:
    made = ctx.zeros((2, 3), ml.DType.F32)
    broken = Failing.whole(made.storage, made.dtype, made.shape)
    for name in hooks:
        try:
            found = getattr(broken, name)
            found(ctx)
        except ml.DeviceError as error:
            assert str(error) == f"{name.lstrip('_')}: out of memory on cpu: 4 TiB", error
        else:
            raise AssertionError(name)
    assert made.add(ctx, made).to_numpy().tolist() == [[0, 0, 0]] * 2
try:
    made.to_numpy()
except ml.ClosedError:
    print("1 passed")
"""


def test_running_out_of_memory_in_any_hook_is_a_device_error(project: Path, plugins: Any) -> None:
    assert " passed" in plugins.run([sys.executable, "-c", OUT_OF_MEMORY])


def test_excerpts_of_files_are_what_these_say() -> None:
    found = [Block(*block) for block in FENCE.findall(GUIDE.read_text(encoding="utf-8"))]
    excerpts = [block for block in found if block.title.startswith(EXCERPT)]
    assert excerpts
    for block in excerpts:
        assert block.text in (GUIDE.parents[1] / block.title).read_text(encoding="utf-8")


def test_every_hook_says_in_the_reference_what_it_gets_and_returns() -> None:
    """Hooks are what starts with one underscore and a backend of ours fills in."""
    kinds = {
        ml.base.BaseBackend: NumpyBackend, ml.base.BaseContext: NumpyContext,
        ml.base.StridedTensor: NumpyTensor, ml.base.BaseGroup: ml.base.SoloGroup,
    }  # fmt: skip
    hooks = [
        (base, name)
        for base, ours in kinds.items()
        for name in dir(base)
        if name.startswith("_") and not name.startswith("__") and callable(getattr(base, name))
        if getattr(ours, name) is not getattr(base, name) or name in base.__abstractmethods__
    ]
    assert len(hooks) > 20
    assert [name for base, name in hooks if not getattr(base, name).__doc__] == []


def test_the_tests_that_the_guide_names_exist() -> None:
    from ml.testing import BackendTests

    named = set(re.findall(r"`(test_\w+)", GUIDE.read_text(encoding="utf-8")))
    assert len(named) >= 6
    assert [name for name in sorted(named) if not hasattr(BackendTests, name)] == []
