"""Pages with figures: git carries tables and small pictures, and plots are drawn when the site is built."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import ml
from benchmarks import accuracy, figures, front, pages, report, runs, site
from benchmarks.pages import DOCS
from examples import pictures
from ml.testing.special import RELATIVE

ROOT = DOCS.parent
RESULTS = DOCS / "benchmarks" / "results.json"


PAGES = ["README.md", *(str(page.relative_to(ROOT)) for page in sorted(DOCS.rglob("*.md")))]
FILLED = sorted({**site.PAGES, **figures.TABLES, **figures.sentences()})


@pytest.mark.parametrize("page", FILLED)
def test_a_page_has_the_figures_of_its_records(page: str) -> None:
    """Else: python -m benchmarks.site."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert site.written(page) == text
    assert "-->\n<!-- end -->" not in text


NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?"
UNIT = r"[µu]s|ms|s|seconds?|minutes?|hours?|times|x|tokens/s|%|[KMGT]i?B(?:/s)?|[GM]b/s"
MEASURED = re.compile(rf"(?<![\w.]){NUMBER}(?: ?|-)(?:{UNIT})(?![\w/-])|(?<![\w.,-])\d[\d,]*\.\d+(?!\.?\d)")
"""Whatever has a unit of measurements, or decimals."""
NOT_MEASURED = {
    "": (  # on every page: versions, sizes of models, bandwidths of links
        r"(?:Python|CUDA|capability|vLLM|mlx-lm|transformers|Redis|>=|older than) \d+\.\d+",
        r"\d\.\d (?:million|billion) parameters",
        r"\d[\d.]* Gb/s",
    ),
    "docs/backends.md": ("at most 60 seconds", "finite up to 88.7"),
    "docs/benchmarks/index.md": ("A cache of 1,024 MiB",),
    "docs/benchmarks/prefix.md": ("5% holds two", "268 MB in F32", "134 MB in F32"),
    "docs/compared.md": ("mlxrunner: 8 GiB", "documentation of 0.30"),
    "docs/devices.md": ("60 seconds by default", "instead of 0.9"),
    "docs/embedding-transformers.md": ("8.5 bits", "takes 4.5 and"),
    "docs/embedding-vllm.md": ("a step waits 50 ms", r"0.002, 1.0 \| seconds until", r"0.05 \| seconds that"),
    "docs/limits.md": (r"much of it on \[3.15",),
    "docs/models.md": ("above 256 MiB",),
    "docs/prefix-cache.md": ("16 times its states",),
    "docs/quantized.md": (  # what the formats take by their definition
        *(r"0.531 \|", r"0.281 \|", "0.516 for 128", "0.563, 0.531, 0.516", r"0.5 \+ 4 / group"),
        *("0.313, 0.281, 0.266", "2 MiB on a CPU, 64 MiB on a GPU"),
    ),
    "docs/remote-stores.md": (
        *("each 4 MiB", "up to 30 seconds", "after 15 minutes", "at least 16 MiB", "5 seconds to wait"),
        *(r"\(10 seconds\)", "128 KiB per token", "at most 50 ms longer"),
    ),
    "docs/server.md": ("folder to 64 MiB", r"host memory \(256 MiB", "at most , 256 MiB", r"\(30 s\)"),
    "docs/versions.md": ("2.5 needs", "2.6 fails", "fails with 5.18"),
    "docs/writing-a-store.md": ("at least 1 GiB",),
}
"""What has a unit and is a default, a limit, a size that follows from others, or a version."""


def prose(page: str) -> str:
    """A page without code, addresses, tables of records and sentences of records."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"<!-- table: .*?<!-- end -->", "", text, flags=re.DOTALL)
    for lines in figures.sentences().get(page, {}).values():
        for sentence in lines:
            text = figures.pattern(sentence).sub("", text)
    for code in (r"^```.*?^```", r"`[^`]*`", r"\]\([^)]*\)"):
        text = re.sub(code, "", text, flags=re.DOTALL | re.MULTILINE)
    return text


@pytest.mark.parametrize("page", PAGES)
def test_every_measured_figure_is_taken_from_a_record(page: str) -> None:
    """Else: name its sentence in benchmarks/sentences.md, or say below that nobody has measured it."""
    known = "|".join((*NOT_MEASURED[""], *NOT_MEASURED.get(page, ())))
    text = re.sub(known, "", prose(page))
    found = [text[max(0, one.start() - 40) : one.end() + 20] for one in MEASURED.finditer(text)]
    assert not found, found


def test_the_page_of_benchmarks_has_rows_of_each_part() -> None:
    results = pages.load(RESULTS)
    page = (DOCS / "benchmarks" / "index.md").read_text(encoding="utf-8")
    tabled = [part for name, part in results["parts"].items() if f"<!-- table: {name} -->" in page]
    assert len(tabled) == 4
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


def test_each_record_says_how_it_was_made_and_its_page_how_to_make_it_again() -> None:
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in FILLED)
    records = sorted(runs.RUNS.glob("*.json"))
    assert records
    for path in records:
        record = pages.load(path)
        assert all(record[name] for name in ("command", "date", "commit", "machine", "printed")), path.name
        command = record["command"]
        assert f"`{command}`" in text or f"\n$ {command} " in text, command
    made = pages.load(DOCS / pages.RECORDS)
    others = {
        path for path in DOCS.rglob("*.json") if path.parent != runs.RUNS and path != DOCS / pages.RECORDS
    }
    assert {str(path.relative_to(DOCS)) for path in others} - {"compared.json"} == {*made}
    assert all({"command", "date", "machine"} <= each.keys() for each in made.values())
    assert all(each.get("commit") or each.get("brought by") for each in made.values())


def test_a_sentence_takes_its_figures_from_the_record() -> None:
    record = {"rows": {"a b": {"ms, median": "1,234.5 [1, 2]", "share": 0.125}}}
    sentence = "takes {rows[a b][ms, median]:.1f/1e3} s, {rows[a b][share]:.0%} of [it]."
    found = figures.pattern(sentence)
    assert (
        figures.filled("It takes 9 s, 99% of [it].", "page", sentence, record)
        == "It takes 1.2 s, 12% of [it]."
    )
    assert found.search("It takes 1,234.5 [1, 2] s, 12% of [it].")
    assert not found.search("It takes long.")
    with pytest.raises(ValueError, match="page has 0 times"):
        figures.filled("It takes long.", "page", sentence, record)
