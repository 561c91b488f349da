"""Figures and small pictures of the docs, which git carries: ``python -m benchmarks.site`` writes them.

Plots are large, and differ from one matplotlib to the next: this file is also the hook of mkdocs that draws
them when the site is built.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # mkdocs loads this file by its path

from benchmarks import agents, engines, figures, report, two_hosts_report
from benchmarks.pages import DOCS, filled, load
from examples import pictures

PAGES: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, str]]]] = {
    "docs/benchmarks/index.md": ("benchmarks/" + report.RECORD, report.tables),
    "docs/benchmarks/prefix.md": ("benchmarks/" + agents.RECORD, agents.tables),
    "docs/server.md": ("benchmarks/" + engines.RECORD, engines.tables),
    "docs/remote-stores.md": (
        "two-hosts/figures.json",
        lambda record: {"two-hosts": two_hosts_report.tables(record)},
    ),
}
"""Pages with tables of one large record, and what writes them; ``benchmarks.figures`` has the others."""


def written(page: str) -> str:
    """A page with its tables, and the figures in its sentences, as the records have them."""
    tables: dict[str, str] = {}
    if page in PAGES:
        record, of = PAGES[page]
        tables |= of(load(DOCS / record))
    tables |= {mark: of() for mark, of in figures.TABLES.get(page, {}).items()}
    text = filled((DOCS.parent / page).read_text(encoding="utf-8"), tables)
    return figures.written(text, page)


def plots() -> dict[str, bytes]:
    """What is drawn when the site is built, by its path in it."""
    found = {"pictures/occupancy.svg": pictures.occupancy_plot()}
    results = load(DOCS / "benchmarks" / report.RECORD)
    found |= {f"benchmarks/{name}": drawn for name, drawn in report.plots(results).items()}
    found["benchmarks/agents.svg"] = agents.plot(load(DOCS / "benchmarks" / agents.RECORD))
    models = two_hosts_report.load(DOCS)["models"]
    return found | {f"two-hosts/{name}.svg": two_hosts_report.plot(of) for name, of in models.items()}


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for path, content in plots().items():
        files.append(File.generated(config, path, content=content))
    return files


def main() -> None:
    for page in {**PAGES, **figures.TABLES, **figures.sentences()}:
        text = written(page)
        (DOCS.parent / page).write_text(text, encoding="utf-8")
    for name, drawn in pictures.drawings().items():
        (DOCS / "pictures" / f"{name}.svg").write_bytes(drawn)


if __name__ == "__main__":
    main()
