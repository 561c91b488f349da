"""The census's records, the tables of docs/models.md, which are of them, and the whole of a record."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import DOCS, table

__all__ = ["DRIVEN", "PAGE", "RECORDS", "Results", "keep", "merged", "supported", "tables", "whole"]

RECORDS, PAGE = DOCS / "benchmarks" / "census", DOCS / "models.md"
DRIVEN = "driven"
"""The mode of an engine's census that says which way a type is driven."""
SHORT = {"=": "=", "theirs": "~", "right": "+", "refused": "r", "cannot": "t", "wrong": "wrong"}
"""How a verdict is shown in the whole table."""
LEGEND = """=: our cache, the runtime's own and a run without a cache agree
~: ours agrees with the runtime's own, and both differ from a run without a cache
+: ours agrees with a run without a cache, and the runtime's own differs or fails
r: ours refuses; t: the runtime's own fails in the same way; the numbers are those of the notes"""
Results = Mapping[str, Mapping[str, Any]]
"""By type and mode, the kind of verdict and what was said; {"": why} of a type that is not built."""
Cells = tuple[str, ...]


def keep(results: Results, file: Path) -> None:
    """JSON with a line for each type."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(found)}" for name, found in results.items())
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def merged(record: Results, others: Iterable[Results]) -> Results:
    """The record with what others found in the place of what it has of the same types and modes."""
    found = dict(record)
    for name, modes in (item for results in others for item in results.items()):
        former = {mode: verdict for mode, verdict in found.get(name, {}).items() if mode and "" not in modes}
        found[name] = {**former, **modes}
    return {name: found[name] for name in sorted(found, key=str.lower)}


def supported(results: Results) -> tuple[int, int]:
    """How many types are not refused as a whole, and how many were built."""
    built = [found for found in results.values() if "" not in found]
    return sum(_verdicts(found)[0][1] != "refused" for found in built), len(built)


def tables(library: str, results: Results) -> dict[str, str]:
    """By mark, what the page says of a library: a line of the types that are alike, rows for the others."""
    built = {name: found for name, found in results.items() if "" not in found}
    good, count = supported(results)
    shown = [f"{count} types were built; {good} are supported and {count - good} refused."]
    parts = _driven(built) if any(DRIVEN in found for found in built.values()) else _cached(built)
    shown += [*parts, _unbuilt(results)] if not library.endswith("-engine") else parts
    return {library: "\n\n".join(part for part in shown if part)}


def _cached(built: Results) -> list[str]:
    """Of types in our caches."""
    same, alike = [], []
    rows: dict[Cells, list[str]] = {}
    for name, found in built.items():
        verdicts = _verdicts(found)
        kinds = {kind for _, kind, _ in verdicts}
        refused, cannot, wrong = (_modes(verdicts, kind) for kind in ("refused", "cannot", "wrong"))
        if kinds == {"="}:
            same.append(name)
        elif kinds <= {"=", "theirs", "right"}:
            alike.append(name)
        elif verdicts[0][1] == "refused":
            rows.setdefault(("everything", ""), []).append(name)
        else:
            ours = f"{refused} WRONG: {wrong}".lstrip() if wrong else refused
            rows.setdefault((ours, cannot), []).append(name)
    grouped = [(_names(names), *cells) for cells, names in _largest_first(rows)]
    return [
        _line("Equal in every mode", same),
        _line("As the runtime's own caches or better in every mode", alike),
        table(("types", "our caches refuse", "the runtime's own caches fail too"), grouped),
    ]


def _driven(built: Results) -> list[str]:
    """Of types under the engine: the most common way has every type that has no other."""
    ways: dict[str, list[str]] = {}
    rows: dict[Cells, list[str]] = {}
    for name, found in built.items():
        (_, way, told), *others = _verdicts(found)
        unlike = ", ".join(f"{mode}: {kind}" for mode, kind, _ in others if kind != "=")
        if way == "refused":
            rows.setdefault((f"refused: {_reason(told)}",), []).append(name)
        elif unlike:
            rows.setdefault((f"{way}; {unlike}",), []).append(name)
        else:
            ways.setdefault(way, []).append(name)
    grouped = [(_names(names), *cells) for cells, names in _largest_first(rows)]
    lines: list[str] = []
    for way, names in sorted(ways.items(), key=lambda item: -len(item[1])):
        rest = f"**`{way}`** ({len(names)}): all that are not named below."
        lines.append(_line(f"`{way}`", names) if lines else rest)
    return [*lines, table(("types", "what is different"), grouped)]


def _verdicts(found: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Mode, kind, and what was said."""
    return [(mode, kind, told) for mode, (kind, told) in found.items()]


def _modes(verdicts: Iterable[tuple[str, str, str]], wanted: str) -> str:
    """Of these modes; "prefix, lookup" is shown as "prefix (lookup)"."""
    return ", ".join(re.sub(r", (.*)", r" (\1)", mode) for mode, kind, _ in verdicts if kind == wanted)


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names, key=str.lower))


def _line(what: str, names: Sequence[str]) -> str:
    return f"**{what}** ({len(names)}): {_names(names)}." if names else ""


def _largest_first(groups: Mapping[Cells, list[str]]) -> list[tuple[Cells, list[str]]]:
    return sorted(groups.items(), key=lambda item: (-len(item[1]), _names(item[1]).lower()))


def _reason(told: str) -> str:
    """Of "NotSupportedError: what: a type is so; do that": "is so"."""
    return re.sub(r"[\d.]+ of the largest", "far", told.split(": ", 2)[-1].split(";")[0].partition(" ")[2])


def _unbuilt(results: Results) -> str:
    reasons: dict[Cells, list[str]] = {}
    for name, found in results.items():
        if "" in found:
            reasons.setdefault((re.sub(r"; \w+ is its decoder", "", str(found[""])),), []).append(name)
    listed = "; ".join(f"{_names(names)} ({why})" for (why,), names in _largest_first(reasons))
    return f"**Not built**: {listed}." if listed else ""


def whole(results: Results) -> str:
    """Every type with every mode; those with the same results are a group."""
    notes: dict[str, int] = {}
    modes = list(dict.fromkeys(mode for found in results.values() for mode in found if mode))
    rows: dict[Cells, list[str]] = {}
    for name, found in results.items():
        if "" not in found:
            verdicts = [found.get(mode, ("", "")) for mode in modes]
            cells = tuple(_cell(name, kind, told, notes) for kind, told in verdicts)
            rows.setdefault(cells, []).append(name)
    groups = [(str(number), *group) for number, group in enumerate(_largest_first(rows), 1)]
    lines = [LEGEND, table(("group", *modes), [(number, *cells) for number, cells, _ in groups])]
    lines += [table(("group", "types", "which"), [(n, str(len(of)), _names(of)) for n, _, of in groups])]
    lines += ["\n".join(f"{number}. {note}" for note, number in notes.items()), _unbuilt(results)]
    return "\n\n".join(lines)


def _cell(name: str, kind: str, told: str, notes: dict[str, int]) -> str:
    """A verdict, with the number of the note that says why it is so."""
    if kind not in ("refused", "cannot", "wrong"):
        return SHORT.get(kind, kind)
    note = re.sub(rf"(?<!\ban )\b{re.escape(name.split()[0])}\b", "a type", told)
    note = re.sub(r"such as \w+|\bsize of tensor .*|\b\w+For\w+|\[\d+\]", "...", note)
    note = re.sub(r"layer \d+ of [\w ]+? (is|wants|reads|sets)\b", r"a layer of a type \1", note)
    note = re.sub(r"\b\w+Decoder\b", "a decoder", note)
    return f"{SHORT[kind]}{notes.setdefault(note, len(notes) + 1)}"
