"""Figures in sentences: what ``sentences.md`` here says that pages say, and the tables of runs.

``python -m benchmarks.site`` writes the figures into the pages, and a test compares them. A field is a path
into a record and a format, ``{row[column]:.1f}``; ``/1e9`` behind the format divides by that first.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import agents, engines, report, runs
from benchmarks.pages import DOCS, load, table

Record = Mapping[str, Any]
BENCHMARKS = DOCS / "benchmarks"
FIGURE = r"[-+]?\d[\d,]*(?:\.\d+)?%?(?: \[[^\]]*\])?"
"""A number, with the interval behind it if there is one."""


class _Figures(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        """A printed cell gives its first number where a format is asked for."""
        spec, _, divisor = format_spec.partition("/")
        if spec and isinstance(value, str):
            value = float(re.findall(r"[-+]?\d[\d,]*\.?\d*", value)[0].replace(",", ""))
        return format(value / float(divisor) if divisor else value, spec)


_FIGURES = _Figures()


def pattern(sentence: str) -> re.Pattern[str]:
    """What finds a sentence whatever figures it has."""
    parts = _FIGURES.parse(sentence)
    return re.compile(
        "".join(re.escape(text) + (FIGURE if name is not None else "") for text, name, *_ in parts)
    )


def sentences() -> dict[str, dict[str, list[str]]]:
    """By page and source, of ``sentences.md``."""
    found: dict[str, dict[str, list[str]]] = {}
    for line in Path(__file__).with_name("sentences.md").read_text(encoding="utf-8").splitlines():
        mark, _, text = line.partition(" ")
        if mark == "##":
            page = found.setdefault(text, {})
        elif mark == "###":
            source = page.setdefault(text, [])
        elif mark == "*":
            source.append(text)
    return found


def record_of(source: str) -> Record:
    """The cells of a run, ``runs/NAME``, or what the function of that name here gives.

    Cells are also in ``cells``, for names that no field can begin with.
    """
    if source.startswith("runs/"):
        cells = runs.fields(source.removeprefix("runs/"))["cells"]
        return {**cells, "cells": cells}
    found: Record = globals()[source]()
    return found


def written(text: str, page: str) -> str:
    """A page with the figures of its sentences, each of which it has once."""
    for source, lines in sentences().get(page, {}).items():
        record = record_of(source)
        for sentence in lines:
            text = filled(text, page, sentence, record)
    return text


def filled(text: str, page: str, sentence: str, record: Record) -> str:
    found = pattern(sentence).findall(text)
    if len(found) != 1:
        raise ValueError(f"{page} has {len(found)} times what benchmarks/sentences.md says: {sentence!r}")
    return text.replace(found[0], _FIGURES.vformat(sentence, (), record))


# Records, as sentences and tables take figures from them.


def rows_of(record: Record) -> Record:
    """The rows of a report by where, measurement and contender."""
    found: dict[str, dict[str, dict[str, report.Row]]] = {}
    for part in record["parts"].values():
        for row in (report.Row(*row) for row in part["rows"]):
            found.setdefault(row.group, {}).setdefault(row.measurement, {})[row.contender] = row
    return found


def results() -> Record:
    return rows_of(load(BENCHMARKS / report.RECORD))


def ragged() -> Record:
    """``mlx_least`` and ``mlx_most`` are ratios to the faster of the ways that are written by hand."""
    found = rows_of(load(BENCHMARKS / "ragged.json"))
    ratios = [
        row["ours"].ratio for row in found["mlx float32"].values() if "ours" in row and row["ours"].ratio
    ]
    return {**found, "mlx_least": min(ratios), "mlx_most": max(ratios)}


def two_hosts() -> Record:
    """The longest prompt of the larger model; seconds."""
    point = load(DOCS / "two-hosts" / "figures.json")["models"]["llama"]["points"][-1]
    fetched = {f"{gigabits:g} Gb/s": s for gigabits, s in point["restored"] if gigabits}
    return {**point, "fetched": fetched}


def whole_trace() -> Record:
    """Shares of all blocks, in percent, by setting, kind and room, and by model and room."""
    record = load(BENCHMARKS / agents.WHOLE)
    blocks = record["trace"]["blocks"]
    found: dict[str, Any] = {name: 100 * each["found"] / blocks for name, each in record["replays"].items()}
    for room, models in record["models"].items():
        found |= {f"{name}, {room}%": 100 * count / blocks for name, count in models.items()}
    return found | record | {"ceiling": 100 * record["ceiling"] / blocks}


def first_requests() -> Record:
    """``tokens``: of a request whose time of the host was taken, on average."""
    record = load(BENCHMARKS / agents.RECORD)
    shares = 100 * record["ceiling"] / record["trace"]["blocks"]
    return {"ceiling": shares, "tokens": record["times"]["full"]["tokens"]}


def leaving() -> Record:
    """The time of a page-out to a full host memory, in times of a copy, by backend and dtype."""
    tables = runs.fields("page-out")["tables"]
    return {
        name: [table[2][2] for table in tables[4 * i : 4 * i + 2]]
        for i, name in enumerate(("numpy", "torch", "mlx"))
    }


def tenants() -> Record:
    """By who had asked a prompt before: the share of pairs in which a new one took longer."""
    return {row[0]: row[2] for row in runs.fields("tenants")["tables"][0] if len(row) > 2}


def attending() -> Record:
    """``shared``: a step over a shared prompt with attention "kvcache", in times of ``DynamicCache``'s."""
    row = runs.fields("transformers-attention")["cells"]["32 rows that share 1,000"]
    return {"shared": row["HFCache, kvcache"].partition("(")[2].rstrip(")")}


def quantized() -> Iterator[tuple[str, dict[str, list[str]]]]:
    """By backend, rows by operation and format: ms and times F32 after 4,096 tokens, and after 32,768."""
    for name in ("torch", "numpy"):
        _, *rows = runs.fields(f"quantized-{name}")["tables"][0]
        yield name, {label: cells for label, *cells in rows}


def putting() -> Record:
    return {name: rows["put, Q8_0"][1] for name, rows in quantized()}


def eviction() -> Record:
    """Perplexities: ``latest`` of keeping the latest 64 tokens, ``full`` of keeping all."""
    found = runs.fields("eviction")
    told = next(line for line in found["printed"] if "full cache:" in line)
    return {"latest": found["tables"][0][1][1], "full": told.split()[-1]}


def many_runtimes() -> Record:
    """The range of seconds to the first token, of turns that found what a runtime before them has stored."""
    rows = runs.fields("many-runtimes")["tables"][0][2:]
    found: dict[str, float] = {}
    for column, name in ((1, "computed"), (2, "restored")):
        seconds = [float(row[column]) for row in rows]
        found |= {f"{name} least": min(seconds), f"{name} most": max(seconds)}
    return found


def beside_servers() -> Record:
    """How many times the tokens/s of ``transformers serve`` ours has, by clients that share a prefix."""
    found = load(BENCHMARKS / engines.RECORD)["transformers"]["found"]
    ours, theirs = (
        found[name]["rounds"] for name in ("kvcache serve, transformers' model", "transformers serve")
    )
    rates = {size: engines.median(ours[size], 0) / engines.median(theirs[size], 0) for size in ours}
    shared = {
        f"{size.split('/')[0]} clients": rate for size, rate in rates.items() if not size.endswith("/0")
    }
    return {**shared, "none shared": rates["1/0"]}


def gpu() -> Record:
    return {path.stem: load(path) for path in (BENCHMARKS / "gpu").glob("*.json")}


def census() -> Record:
    """How many types were built, and how many of them are supported."""
    found = re.search(
        r"<!-- table: transformers -->\s+(\d+) types were built; (\d+) are supported",
        (DOCS / "models.md").read_text(encoding="utf-8"),
    )
    assert found is not None
    return {"built": found[1], "supported": found[2]}


def mutation() -> Record:
    scores = [area["score"] for area in load(DOCS / "mutation.json").values()]
    return {"least": min(scores), "most": max(scores)}


def speculation() -> Record:
    """Tokens per pass at temperature 0, by draft."""
    _, *rows = runs.fields("speculation")["tables"][0]
    return {draft: float(tokens) for draft, temperature, _, _, tokens in rows if temperature == "0.0"}


def suites() -> Record:
    return runs.fields("conformance")


def quick_suites() -> Record:
    return runs.fields("conformance-quick")


def soak() -> Record:
    """``answers``: those that nobody left."""
    cells = runs.fields("soak")["cells"]
    return {**cells, "answers": int(cells["answers: whole"]) + int(cells["answers: slow"])}


# Tables.


def ragged_table() -> str:
    """Ratios on PyTorch, of each kind of batch by its sizes."""
    rows = rows_of(load(BENCHMARKS / "ragged.json"))["torch float32"]
    cells = []
    for title, name, sizes in (
        ("{} sequences that share 100 tokens", "shared, {} readers of 100", (2, 8, 64, 256)),
        ("{} sequences that share 8,000 tokens", "shared, {} readers of 8000", (2, 8, 64, 256)),
        ("{} sequences of 10 to 120 tokens", "ragged, {} sequences of 10 to 120", (5, 32, 64, 256)),
        ("{} sequences of 100 to 2,000 tokens", "ragged, {} sequences of 100 to 2000", (32, 64)),
        ("1 sequence of {} tokens", "one, 1 sequence of {}", (128, 1024, 8192)),
    ):
        ours = [rows[name.format(size)]["ours"] for size in sizes]
        copies = [row.note.partition("x loop over copies")[0] for row in ours if "copies" in row.note]
        numbers = ", ".join(f"{size:,}" for size in sizes)
        hand = ", ".join(f"{row.ratio:.2f}" for row in ours)
        cells.append((title.format(numbers), hand, ", ".join(copies)))
    return table(
        ("one step of", "ours / by hand", "ours / a call per sequence, each with its own copy"), cells
    )


def gpu_attention() -> str:
    found, rows = load(BENCHMARKS / "gpu" / "f.json")["steps"]["attend"]["found"], []
    ways = (
        "torch varlen_attn", "sdpa, equal lengths", "transformers StaticCache, sdpa", "ours, put + attend",
        "ours, attend",
    )  # fmt: skip
    for count, each in ((1, 1024), (64, 1024), (1, 8192), (64, 8192), (64, 32768)):
        one = found[f"{count} sequences of {each}"]
        times = [one["times"][way]["event_us"] if way in one["times"] else None for way in ways]
        cells = ["" if us is None else f"{us:,.0f}" if us >= 100 else f"{us:.1f}" for us in times]
        speed = f"{one['bytes_per_s']['ours, attend'] / 1e12:.2f}"
        rows.append((f"{count} of {each:,}", *cells[:3], f"**{cells[3]}**", cells[4], speed))
    head = ("sequences", "`varlen_attn`", "SDPA", "`StaticCache`", "**put + attend**", "attend", "TB/s")
    return table(head, rows)


def returning() -> str:
    rows = []
    for label, row in runs.fields("returning")["cells"].items():
        given, _, content = label.partition(", from ")
        if given.endswith("an array"):
            cells = row["close, new"], row["begin"], row["close"]
            rows.append((f"in {content.replace('full', 'full attention')}", *cells))
    return table(("the prompt is an array; content is", "close, new", "begin", "close"), rows)


def quantized_table() -> str:
    backends = [rows for _, rows in quantized()]
    lines = [("F32, ms", *(cell for rows in backends for cell in rows["attend, F32"][::2]))]
    for label in dict.fromkeys(label for rows in backends for label in rows if label.startswith("attend, ")):
        if label != "attend, F32":
            cells = (cell for rows in backends for cell in rows.get(label, [""] * 4)[1::2])
            lines.append((label.removeprefix("attend, "), *cells))
    return table(("attend", "PyTorch, 4k", "32k", "NumPy, 4k", "32k"), lines)


def perplexity_table() -> str:
    plain, outliers = (runs.fields(name)["cells"] for name in ("perplexity", "perplexity-outliers"))
    lines = []
    for name, row in plain.items():
        of = [f"{one['perplexity']} ({one['against F32']})" for one in (row, outliers[name])]
        lines.append((name, row["bytes per token"], of[0], row["agree"], of[1], outliers[name]["agree"]))
    return table(
        ("keys and values", "bytes per token", "perplexity", "agree", "with outliers", "agree"), lines
    )


def restores() -> str:
    """Times the floor's time, by backend and dtype."""
    rows: list[list[str]] = []
    every, one = runs.fields("restores"), runs.fields("restores-one-reader")
    for title, printed in (
        ("from host memory", every["tables"][0]), ("from disk", every["tables"][1]),
        ("from disk with one reader (`--readers 1`)", one["tables"][0]),
    ):  # fmt: skip
        rows.append([title, *(row[printed[0].index("ratio")] for row in printed[1:])])
    alone = every["tables"][1]
    rows.append(["`Path.read_bytes`", *(row[4].rpartition("read_bytes ")[2] for row in alone[1:])])
    shown = {"numpy": "NumPy", "torch": "PyTorch", "mlx": "MLX"}
    names = [row[0].split() for row in alone[1:]]
    return table(("", *(f"{shown[backend]} {dtype}" for backend, dtype in names)), rows)


def several_rows() -> str:
    """Of those that the run has, batches in which attention is most of a step."""
    head, *rows = runs.fields("transformers-attention")["tables"][0]
    return table(head, (row for row in rows if row[0].startswith(("32", "8"))))


def beside_a_socket(name: str) -> Callable[[], str]:
    """Throughput of a store's calls, as shares of a plain socket's."""

    def found() -> str:
        rows = [row for op in runs.fields(name)["tables"][:2] for row in op[1:] if "socket" not in row[0]]
        return table(("", "GB/s", "of a socket's"), ((row[0], row[1], row[3].split()[0]) for row in rows))

    return found


def printed(name: str, which: int = 0) -> Callable[[], str]:
    """A table as a run printed it."""

    def found() -> str:
        head, *rows = runs.fields(name)["tables"][which]
        return table(head, rows)

    return found


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "docs/benchmarks/index.md": {
        "ragged": ragged_table,
        "host": printed("host"),
        "transformers-update": printed("transformers-update"),
        "transformers-step": printed("transformers-update", 1),
        "transformers-attention": several_rows,
        "mlx-lm-cache": printed("mlx-lm-cache"),
    },
    "docs/benchmarks/prefix.md": {"returning": returning, "restores": restores},
    "docs/devices.md": {"gpu-attention": gpu_attention},
    "docs/embedding-vllm.md": {"many-runtimes": printed("many-runtimes")},
    "docs/quantized.md": {"quantized": quantized_table, "perplexity": perplexity_table},
    "docs/remote-stores.md": {"valkey": beside_a_socket("valkey"), "mooncake": beside_a_socket("mooncake")},
}
"""Tables that are made of these records, by page and mark; ``benchmarks.site`` has those of other modules."""
