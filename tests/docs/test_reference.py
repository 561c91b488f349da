"""The reference: every public name has its place in it, and the examples in docstrings run as they stand."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ("kvcache", "kvcache.stores", "kvcache_engine", "ml", "ml.nn", "ml.strided")


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    pytest.importorskip("griffe", reason="mkdocstrings is not installed")
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def packages(reference: ModuleType) -> dict[str, Any]:
    import griffe

    loader = griffe.GriffeLoader(search_paths=[ROOT], extensions=griffe.Extensions(reference.Markdown()))
    for name in ("ml", "kvcache", "kvcache_engine"):
        loader.load(name)
    loader.resolve_aliases(external=False)
    return {name: loader.modules_collection[name] for name in reference.PACKAGES}


def test_every_public_class_has_a_page_and_every_function_a_place(
    reference: ModuleType, packages: dict[str, Any]
) -> None:
    shown: set[str] = set()
    pages = {name: dict(reference.pages_of(module, shown)) for name, module in packages.items()}
    for name, module in packages.items():
        for public in module.exports:
            member = module[public]
            assert member.canonical_path in shown, member.path
        overview = pages[name][f"reference/{name}/index.md"]
        assert "PYTEST_DONT_REWRITE" not in overview
        assert set(re.findall(r"\]\(([\w.]+\.md)", overview)) == {
            Path(path).name for path in pages[name] if not path.endswith("index.md")
        }
    assert "inherited_members: ['remove'" in pages["kvcache"]["reference/kvcache/CausalCache.md"]
    assert "inherited_members: []" in pages["kvcache"]["reference/kvcache/SlidingWindowCache.md"]


def test_docstrings_are_plain_text_with_code_in_backticks(packages: dict[str, Any]) -> None:
    """A role of Sphinx would be printed as it stands, by mkdocs as by ``help``."""
    roots = {name.split(".")[0]: module.package for name, module in packages.items()}
    assert [path for root in roots.values() for path in with_roles(root)] == []


def with_roles(member: Any) -> list[str]:
    found = [member.path] if member.docstring and re.search(r":[a-z]+:`", member.docstring.value) else []
    return found + [path for one in member.members.values() if not one.is_alias for path in with_roles(one)]


@pytest.mark.parametrize("package", EXAMPLES)
def test_the_examples_in_docstrings_run(package: str) -> None:
    module = importlib.import_module(package)
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    tests = {
        (test.filename, test.lineno): test
        for public in (module, *(getattr(module, name) for name in module.__all__))
        if isinstance(public, type | ModuleType) or callable(public)
        for test in finder.find(public, getattr(public, "__name__", package))
        if test.examples
    }
    assert tests
    for test in tests.values():
        test.globs["__name__"] = "example"
        assert runner.run(test).failed == 0, test.name


def test_labels_of_the_navigation_are_the_titles_of_the_pages() -> None:
    labels = re.findall(r'^      - "?(.*?)"?: (\S+\.md)$', (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(labels) > 10
    for label, page in labels:
        title = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()[0]
        assert title == f"# {label}", page
