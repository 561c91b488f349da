"""The hook of mkdocs: draws the pictures and plots of the docs, and writes the tables of benchmarks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # mkdocs loads this file by its path

from benchmarks import agents, engines, report, two_hosts_report
from benchmarks.pages import DOCS, filled, load
from examples import pictures

PAGES: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, str]]]] = {
    "benchmarks/index.md": ("benchmarks/" + report.RECORD, report.tables),
    "benchmarks/prefix.md": ("benchmarks/" + agents.RECORD, agents.tables),
    "server.md": ("benchmarks/" + engines.RECORD, engines.tables),
    "remote-stores.md": (
        "two-hosts/figures.json",
        lambda record: {"two-hosts": two_hosts_report.tables(record)},
    ),
}
"""Pages with tables, the records that these are of, and what writes them."""


def drawings() -> dict[str, bytes]:
    """Every drawing of the site by its path in it."""
    found = {f"pictures/{name}.svg": drawn for name, drawn in pictures.drawings().items()}
    results = load(DOCS / "benchmarks" / report.RECORD)
    found |= {f"benchmarks/{name}": drawn for name, drawn in report.plots(results).items()}
    found["benchmarks/agents.svg"] = agents.plot(load(DOCS / "benchmarks" / agents.RECORD))
    models = two_hosts_report.load(DOCS)["models"]
    return found | {f"two-hosts/{name}.svg": two_hosts_report.plot(of) for name, of in models.items()}


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for path, content in drawings().items():
        files.append(File.generated(config, path, content=content))
    return files


def tables_of(page: str) -> dict[str, str]:
    """The tables that are filled into a page, by their marks."""
    if page not in PAGES:
        return {}
    record, written = PAGES[page]
    return written(load(DOCS / record))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return filled(markdown, tables_of(page.file.src_uri))
