"""Pages with figures: git carries tables and small pictures, and plots are drawn when the site is built."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import ml
from benchmarks import accuracy, front, pages, report, site
from benchmarks.pages import DOCS
from examples import pictures
from ml.testing.special import RELATIVE

ROOT = DOCS.parent
RESULTS = DOCS / "benchmarks" / "results.json"


@pytest.mark.parametrize("page", site.PAGES)
def test_a_page_has_the_tables_of_its_record(page: str) -> None:
    """Else: python -m benchmarks.site."""
    text = (DOCS / page).read_text(encoding="utf-8")
    assert pages.filled(text, site.tables_of(page)) == text
    assert "-->\n<!-- end -->" not in text


def test_the_page_of_benchmarks_has_rows_of_each_part() -> None:
    results = pages.load(RESULTS)
    page = (DOCS / "benchmarks" / "index.md").read_text(encoding="utf-8")
    tabled = [part for name, part in results["parts"].items() if f"<!-- table: {name} -->" in page]
    assert len(tabled) == 2
    for part in tabled:
        ours = [row for row in (report.Row(*row) for row in part["rows"]) if row.contender.startswith("ours")]
        for row in (ours[0], ours[-1]):
            median = f"{row.median:,.0f}" if row.median >= 1000 else f"{row.median:.1f}"
            assert f"| {row.group} | {row.measurement} | {median} {row.unit} |" in page


def test_every_picture_that_is_shown_is_in_git_or_drawn_for_the_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else: python -m benchmarks.site."""
    pytest.importorskip("matplotlib")
    shown = set()
    for page in DOCS.rglob("*.md"):
        for name in re.findall(r"\]\(([\w./-]+\.svg)\)", page.read_text(encoding="utf-8")):
            shown.add((page.parent / name).relative_to(DOCS).as_posix())
    plots = site.plots()
    kept = {path.relative_to(DOCS).as_posix(): path.read_bytes() for path in DOCS.rglob("*.svg")}
    assert shown == {*plots, *kept}
    assert all(b"<svg" in content and len(content) > 2000 for content in plots.values())
    monkeypatch.setattr(sys, "argv", ["pictures", str(tmp_path / "new")])
    pictures.main()
    drawn = {f"pictures/{path.name}": path.read_bytes() for path in (tmp_path / "new").iterdir()}
    assert drawn.pop("pictures/occupancy.svg") == plots["pictures/occupancy.svg"]
    assert kept == drawn | {front.FILE.name: front.FILE.read_bytes()}


LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
TOLD = "drawn when the site is built"


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *DOCS.rglob("*.md")], ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere_in_a_clone(page: Path) -> None:
    """A plot exists on the built site only: a page that shows one says so."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    missing = {link for link in LINK.findall(text) if not (page.parent / link).exists()}
    assert all(link.endswith(".svg") for link in missing), missing
    assert not missing or TOLD in text, missing


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *DOCS.rglob("*.md")], ids=lambda page: page.name)
def test_every_table_has_a_head_and_as_many_cells_in_each_row(page: Path) -> None:
    """A blank line inside a table, or a cell too few, and what follows is shown as text or is cut off."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, rule, *rows = (re.split(r"(?<!\\)\|", row) for row in block.splitlines())
        assert {cell.strip() for cell in rule[1:-1]} == {"---"}, block
        assert [row for row in (rule, *rows) if len(row) != len(head)] == [], block
        assert rows, block


def numbers(text: str, behind: str = "") -> list[str]:
    return [found.replace(",", "") for found in re.findall(rf"\d[\d,]*(?:\.\d+)?{behind}", text)]


@pytest.mark.parametrize(
    ("page", "least"), [(ROOT / "README.md", 3), (DOCS / "index.md", 4)], ids=["README", "index"]
)
def test_each_figure_of_the_front_page_is_one_of_the_page_that_it_links_to(page: Path, least: int) -> None:
    """As it stands there, or rounded."""
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    measured = {}
    for _, what, *cells in (row.split("|") for row in rows):
        links = re.findall(r"\]\(((?:docs/)?(?:benchmarks/)?[\w-]+\.md)", cells[0])
        figures = numbers(
            re.sub(r"\]\([^)]*\)", "", "".join(cells)), "(?= to [0-9]|.? ?(?:µs|ms|s|times|tokens/s)\\b)"
        )
        if links and figures:
            measured[what] = figures
            there = numbers((page.parent / links[0]).read_text(encoding="utf-8"))
            for figure in figures:
                digits = len(figure.partition(".")[2])
                thousands = -3 if figure.endswith("000") else digits
                assert any(round(float(one), thousands) == float(figure) for one in there), (what, figure)
    assert len(measured) >= least


def test_the_plot_of_the_front_page_is_that_of_its_figures() -> None:
    """Else: python -m benchmarks.front."""
    assert front.FILE.read_text(encoding="utf-8") == front.drawn()


def test_a_record_has_what_fits_on_a_line_on_one(tmp_path: Path) -> None:
    record = {"a": {"b": list(range(100)), "c": 1.23456789}, "rows": [["x" * 100, 1, None]] * 3, "empty": {}}
    pages.save(tmp_path / "to" / "record.json", record)
    lines = (tmp_path / "to" / "record.json").read_text(encoding="utf-8").splitlines()
    assert max(map(len, lines)) < 500
    assert len(lines) == 12
    assert pages.load(tmp_path / "to" / "record.json") == json.loads(json.dumps(record)) | {
        "a": {"b": list(range(100)), "c": 1.23457}
    }
    assert pages.load(tmp_path / "none.json") == {}


def test_a_part_takes_the_place_of_the_one_that_was_recorded(tmp_path: Path) -> None:
    slow, quick = (report.Row("numpy", "m", "ours", time, ratio=time, target=1.0) for time in (2.0, 0.5))
    for row in (slow, quick):
        report.write(tmp_path, {"memory": report.record([row], False, 1.0, None)})
    report.write(tmp_path, {"tail": report.record([slow], False, 1.0, 0.25)})
    page = (tmp_path / "index.md").read_text(encoding="utf-8")
    assert "1 of 2 targets reached; not reached:" in page
    assert page.count("| m (ours) | numpy | 2 | 1 |") == 1
    tables = report.tables(pages.load(tmp_path / "results.json"))
    assert tables.keys() == {"memory", "tail", "machine", "front", "targets"}
    assert report.verdict([slow, quick]) == "1 of 2 targets reached"


def test_the_table_of_accuracy_is_that_of_its_record() -> None:
    """Else: python -m benchmarks.accuracy."""
    page = (DOCS / accuracy.PAGE).read_text(encoding="utf-8")
    record = pages.load(DOCS / accuracy.RECORD)
    assert pages.filled(page, {"accuracy": accuracy.shown(record)}) == page
    bound = RELATIVE[ml.DType.F32] / accuracy.UNIT
    for name in ("numpy", "torch", "mlx"):
        errors = record[name]["errors"]
        assert errors.keys() == {*accuracy.ELEMENTWISE, *accuracy.ROWS}
        assert max(errors[call] for call in accuracy.ELEMENTWISE) < bound
