"""Tables and small pictures of the docs, which git carries: ``python -m benchmarks.site`` writes them.

Plots are large, and differ from one matplotlib to the next: this file is also the hook of mkdocs that draws
them when the site is built.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # mkdocs loads this file by its path

from benchmarks import agents, engines, report, two_hosts_report
from benchmarks.pages import DOCS, fill, load
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


def tables_of(page: str) -> dict[str, str]:
    """The tables of a page by their marks."""
    record, written = PAGES[page]
    return written(load(DOCS / record))


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
    for page in PAGES:
        fill(DOCS / page, tables_of(page))
    for name, drawn in pictures.drawings().items():
        (DOCS / "pictures" / f"{name}.svg").write_bytes(drawn)


if __name__ == "__main__":
    main()
