"""Figures in sentences: what a page says, with a field of a record in the place of each figure.

``python -m benchmarks.site`` writes the figures, and a test compares them. A field is a path into the record
and a format, ``{row[column]:.1f}``; ``/1e9`` behind the format divides by that first.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import agents, engines, report, runs
from benchmarks.pages import DOCS, load, table

Record = Mapping[str, Any]
BENCHMARKS = DOCS / "benchmarks"


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
        "".join(re.escape(text) + (r"[^\n]+?" if name is not None else "") for text, name, *_ in parts)
    )


def written(text: str, sentences: Sequence[str], record: Record) -> str:
    """A page with the figures of a record in these sentences, each of which it has once."""
    for sentence in sentences:
        found = pattern(sentence).findall(text)
        if len(found) != 1:
            raise ValueError(
                f"benchmarks.figures has a sentence that its page has {len(found)} times: {sentence!r}"
            )
        text = text.replace(found[0], _FIGURES.vformat(sentence, (), record))
    return text


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
    ratios = [row["ours"].ratio for row in found["mlx float32"].values() if "ours" in row]
    return found | {"mlx_least": min(ratios), "mlx_most": max(ratios)}


def two_hosts() -> Record:
    """The longest prompt of the larger model; seconds."""
    point = load(DOCS / "two-hosts" / "figures.json")["models"]["llama"]["points"][-1]
    return point | {"fetched": {f"{gigabits:g}": s for gigabits, s in point["restored"] if gigabits}}


def whole_trace() -> Record:
    """Shares of all blocks, in percent, by setting, kind and room; ``lru`` and ``belady`` by room."""
    record = load(BENCHMARKS / agents.WHOLE)
    blocks = record["trace"]["blocks"]
    found: dict[str, Any] = {name: 100 * each["found"] / blocks for name, each in record["replays"].items()}
    for room, models in record["models"].items():
        found |= {f"{name}, {room}%": 100 * count / blocks for name, count in models.items()}
    return found | record | {"ceiling": 100 * record["ceiling"] / blocks}


def beside_servers() -> Record:
    """How many times the tokens/s of ``transformers serve`` ours has, by clients."""
    found = load(BENCHMARKS / engines.RECORD)["transformers"]["found"]
    ours, theirs = (
        found[name]["rounds"] for name in ("kvcache serve, transformers' model", "transformers serve")
    )
    return {
        size.split("/")[0]: engines.median(ours[size], 0) / engines.median(theirs[size], 0) for size in ours
    }


def inside_mlx_lm() -> Record:
    """``layer``: milliseconds more per layer and pass, in the model of 32; ``long`` and ``toy``: percent more."""
    cells = runs.fields("mlx-lm-cache")["cells"]
    toy, long = (cells[f"one conversation of {of}"] for of in ("100 tokens, 32 layers of 64", "8,192 tokens"))
    percent = {name: 100 * (float(row["ours / mlx-lm"]) - 1) for name, row in (("toy", toy), ("long", long))}
    return percent | {"layer": (float(toy["ours, ms"]) - float(toy["mlx-lm, ms"])) / 32}


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
    noticed = [area["noticed"] for area in load(DOCS / "mutation.json").values()]
    return {"least": min(noticed), "most": max(noticed)}


SENTENCES: tuple[tuple[str, Callable[[], Record], tuple[str, ...]], ...] = ()


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
        _, given, kind = (
            label.split(", ", 1)[1].rpartition(", ")[0],
            *label.rsplit(", from ", 1)[1].split(": "),
        )
        if "an array" in label:
            layers = kind.replace("full", "full attention")
            rows.append((f"in {given}: {layers}", row["close, new"], row["begin"], row["close"]))
    return table(("the prompt is an array; content is", "close, new", "begin", "close"), rows)


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
