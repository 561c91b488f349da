"""What pages of figures share: records that git can carry, Markdown tables between marks, plots as SVG."""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.timing import machine
from kvcache.testing.bench import Sample

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
RECORDS = "benchmarks/records.json"
"""In DOCS: how each record is made."""
_WIDTH = 240
_DIGITS = 6
_MARK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def packages() -> dict[str, str]:
    """Versions of those that figures depend on, as far as they are installed."""
    found = {}
    for name in ("torch", "transformers", "mlx", "mlx-lm", "numpy", "numba"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def load(path: Path) -> dict[str, Any]:
    """A record; an empty one where there is none."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def provenance(command: str) -> dict[str, Any]:
    """How a record is made; a commit is "-dirty" where code differs from it."""
    commit, changed = _git("rev-parse", "--short=12", "HEAD"), _git("status", "--porcelain", "-uno", ":!docs")
    return {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit + "-dirty" * bool(changed),
        "machine": machine(),
        "packages": packages(),
    }


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()


def save(path: Path, record: Mapping[str, Any]) -> None:
    """JSON with what fits on a line on one, and numbers of six digits.

    ``RECORDS`` then says how a record of the docs was made, unless it says so itself.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_compact(_rounded(record), 0) + "\n", encoding="utf-8")
    if path.is_relative_to(DOCS) and path != DOCS / RECORDS and "command" not in record:
        made = provenance(" ".join(["python", *sys.orig_argv[1:]]))
        save(DOCS / RECORDS, load(DOCS / RECORDS) | {str(path.relative_to(DOCS)): made})


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def _compact(value: Any, depth: int) -> str:
    line = json.dumps(value)
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if len(line) <= _WIDTH or not any(isinstance(item, dict | list) for item in inside):
        return line
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {_compact(item, depth + 1)}" for key, item in value.items()]
    else:
        items = [_compact(item, depth + 1) for item in value]
    lines = ",\n".join(" " * (depth + 1) + item for item in items)
    first, last = "{}" if isinstance(value, dict) else "[]"
    return f"{first}\n{lines}\n{' ' * depth}{last}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    first, *others = ("| " + " | ".join(line) + " |" for line in (head, *rows))
    return "\n".join((first, "|" + "---|" * len(head), *others))


def show(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a Markdown table, each row as soon as it is there."""
    print(table(head, ()), flush=True)
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def milliseconds(sample: Sample, digits: int = 2) -> str:
    """Median [10th, 90th percentile]."""
    median, low, high = (f"{us / 1e3:,.{digits}f}" for us in (sample.median, sample.low, sample.high))
    return f"{median} [{low}, {high}]"


def filled(text: str, tables: Mapping[str, str]) -> str:
    """A page with what is between its marks written anew; marks that ``tables`` does not name stay."""

    def written(mark: re.Match[str]) -> str:
        return f"{mark[1]}\n{tables[mark[2]]}\n\n{mark[3]}" if mark[2] in tables else mark[0]

    return _MARK.sub(written, text)


def fill(page: Path, tables: Mapping[str, str]) -> None:
    page.write_text(filled(page.read_text(encoding="utf-8"), tables), encoding="utf-8")


def axes_of(size: tuple[float, float], count: int = 1) -> Any:
    """Axes side by side in a figure of their own; nothing global is touched."""
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained").subplots(1, count)


def legend(axes: Any, **options: Any) -> None:
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, **options)


def svg(figure: Any) -> bytes:
    """The same bytes for the same figures."""
    import matplotlib

    stream = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "ml-kvcache"}):
        figure.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue()
