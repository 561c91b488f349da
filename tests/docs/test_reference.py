"""The reference: every public name has its place in it, and the examples in docstrings run as they stand."""

from __future__ import annotations

import colorsys
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
    assert 'filters: ["!^__"' in pages["ml.base"]["reference/ml.base/BaseTensor.md"]
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


def luminance(color: tuple[float, float, float]) -> float:
    """The relative luminance of sRGB in [0, 1] (WCAG 2)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_plain_buttons_can_be_read_in_the_dark_scheme() -> None:
    """WCAG's least contrast of text is 4.5. The theme's own colour for these buttons has 2.3."""
    material = pytest.importorskip("material", reason="mkdocs-material is not installed")
    sheets = Path(material.__file__).parent / "templates" / "assets" / "stylesheets"
    palette, main = (
        next(sheets.glob(f"{name}.*.css")).read_text(encoding="utf-8") for name in ("palette", "main")
    )
    extra = (ROOT / "docs" / "stylesheets" / "extra.css").read_text(encoding="utf-8")
    rule = re.search(r'\[data-md-color-scheme="slate"\] [^{]*\.md-button[^{]*\{\s*color: ([^;]+);', extra)
    assert rule is not None
    name = re.fullmatch(r"var\((--[\w-]+)\)", rule[1])
    assert name is not None
    scheme = r"\[data-md-color-scheme=slate\]\[data-md-color-primary=indigo\]"
    text = re.search(scheme + r"\{[^}]*" + name[1] + r":#([0-9a-f]{6})", palette)
    ground = re.search(r"--md-default-bg-color:hsla\(var\(--md-hue\), ?(\d+)%, ?(\d+)%, ?1\)", palette)
    hue = re.search(r"--md-hue:(\d+)", main)
    assert text is not None
    assert ground is not None
    assert hue is not None
    on = luminance(tuple(int(text[1][i : i + 2], 16) / 255 for i in (0, 2, 4)))  # type: ignore[arg-type]
    under = luminance(colorsys.hls_to_rgb(int(hue[1]) / 360, int(ground[2]) / 100, int(ground[1]) / 100))
    assert (on + 0.05) / (under + 0.05) >= 4.5
