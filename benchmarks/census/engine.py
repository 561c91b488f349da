"""What becomes of every type of a library's models in every mode, and the table of it in the docs."""

from __future__ import annotations

import json
import multiprocessing
import re
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import ml

__all__ = ["MARK", "Library", "all_of", "examine", "isolated", "judge", "marks", "render"]

DOCS = Path(__file__).resolve().parents[2] / "docs"
MARK = "census"
"""Between which comments of a page the tables are: <!-- census --> and <!-- /census -->."""
SHORT = {"=": "=", "theirs": "~", "right": "+", "refused": "r", "cannot": "t", "wrong": "wrong"}
"""How a verdict is shown."""


class Library(Protocol):
    """A module of the census."""

    PAGE: str
    MODES: Mapping[str, Callable[[Any, str], Any]]
    """What each does with a case and with "theirs" or "ours" as the cache: what it found."""
    CANNOT: Mapping[str, str]
    """Types that are not built, and why."""

    def types(self) -> Iterable[str]: ...
    def quiet(self) -> None:
        """Let the library say nothing of its own."""

    def Case(self, name: str) -> Any:  # noqa: N802
        """A model, what it is given, and its caches."""

    def agree(self, one: Any, other: Any) -> bool | None:
        """Whether two findings are the same; None where they are not, and a run without a cache decides."""

    def is_right(self, case: Any, mode: str, found: Any) -> bool | None:
        """Whether a run without a cache finds the same; None where there is none."""


def judge(library: Library, case: Any, mode: str) -> tuple[str, str]:
    """What became of one mode, and what was said.

    "=": as with the library's own cache and as without any; "theirs": as with its own, which differs from a
    run without one; "right": as without any, where its own fails or differs; "refused": by us; "cannot": it
    fails with its own cache as it does with ours; "wrong" is the rest.
    """
    theirs, ours = (_attempt(library.MODES[mode], case, which) for which in ("theirs", "ours"))
    failed = isinstance(theirs, Exception)
    if isinstance(ours, Exception):
        by_us = isinstance(ours, ml.NotSupportedError) or (isinstance(ours, ml.MLError) and not failed)
        return "refused" if by_us else "cannot" if failed else "wrong", _told(ours)
    right, same = library.is_right(case, mode, ours), False if failed else library.agree(ours, theirs)
    if same:
        return ("theirs" if right is False else "="), ""
    if right:
        return "right", _told(theirs) if failed else ""
    if same is None and not library.is_right(case, mode, theirs):
        return "theirs", ""
    return "wrong", _told(theirs) if failed else ""


def _attempt(run: Callable[[Any, str], Any], case: Any, which: str) -> Any:
    try:
        return run(case, which)
    except Exception as error:
        error.__traceback__ = None
        return error


def _told(error: Exception) -> str:
    text = re.sub(r"\( \(.*\) \)", "", " ".join(str(error).split()))  # without what a model consists of
    return f"{type(error).__name__}: {text[:300]}"


def examine(library: Library, name: str, say: Callable[[dict[str, Any]], Any]) -> None:
    """Says {} once the type is built, then {mode: (kind, told)}; or {"": why it is not built}."""
    try:
        case = library.Case(name)
    except Exception as error:
        say({"": _told(error)})
        return
    say({})
    own = getattr(library, "judge", judge)
    say({mode: own(library, case, mode) for mode in library.MODES})


def isolated(library: Library, name: str) -> dict[str, Any]:
    """What ``examine`` finds in a process of its own: some types end theirs."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(target=examine, args=(library, name, writer.send))
    child.start()
    writer.close()
    built = False
    try:
        while not (found := reader.recv()):
            built = True
    except EOFError:
        child.join()
        told = f"the process ends with {signal.Signals(-(child.exitcode or 0)).name}"
        found = dict.fromkeys(library.MODES, ("wrong", told)) if built else {"": told}
    child.join()
    return dict(found)


def all_of(library: Library, chosen: Iterable[str], results: dict[str, Any], keep: Path | None) -> None:
    """Add to ``results`` what became of the types that are chosen, or of all that they lack."""
    library.quiet()
    for name in chosen or [name for name in library.types() if name not in results]:
        told = library.CANNOT.get(name)
        results[name] = found = isolated(library, name) if told is None else {"": told}
        print(f"{name}: {found.get('', '')}", flush=True)
        for mode, (kind, said) in found.items() if "" not in found else ():
            print(f"    {mode:16} {kind:8} {said[:200]}", flush=True)
        if keep is not None:
            keep.write_text(json.dumps(results, indent=1), encoding="utf-8")


def render(library: Library, results: Mapping[str, Any]) -> None:
    """Write the tables between the marks of the page; types with the same results are a group."""
    notes: dict[str, int] = {}
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, found in results.items():
        if "" not in found:
            cells = tuple(_cell(name, *found[mode], notes) for mode in library.MODES)
            rows.setdefault(cells, []).append(name)
    groups = sorted(rows.items(), key=lambda row: -len(row[1]))
    lines = ["| group | " + " | ".join(library.MODES) + " |", "|---" * (len(library.MODES) + 1) + "|"]
    lines += [f"| {number} | {' | '.join(cells)} |" for number, (cells, _) in enumerate(groups, 1)]
    lines += ["", "| group | types | which |", "|---|---|---|"]
    lines += [
        f"| {number} | {len(names)} | {', '.join(names)} |" for number, (_, names) in enumerate(groups, 1)
    ]
    lines += ["", *(f"{number}. {note}" for note, number in notes.items())]
    unbuilt = [f"{name} ({found['']})" for name, found in results.items() if "" in found]
    lines += ["", f"Not built: {'; '.join(unbuilt)}."]
    page = DOCS / library.PAGE
    text = page.read_text(encoding="utf-8")
    begin, end = marks(library)
    before, after = text.split(begin)[0], text.split(end)[1]
    page.write_text(f"{before}{begin}\n" + "\n".join(lines) + f"\n{end}{after}", encoding="utf-8")


def marks(library: Library) -> tuple[str, str]:
    """The comments that the tables are between: of a page with several censuses, a library has its own."""
    name = getattr(library, "MARK", MARK)
    return f"<!-- {name} -->", f"<!-- /{name} -->"


def _cell(name: str, kind: str, told: str, notes: dict[str, int]) -> str:
    """A verdict, with the number of the note that says why it is so."""
    if kind not in ("refused", "cannot", "wrong"):
        return SHORT.get(kind, kind)
    note = re.sub(rf"(?<!\ban )\b{re.escape(name.split()[0])}\b", "a type", told)
    note = re.sub(r"such as \w+|\bsize of tensor .*|\b\w+For\w+|\[\d+\]", "...", note)
    note = re.sub(r"layer \d+ of [\w ]+? (is|wants|reads|sets)\b", r"a layer of a type \1", note)
    note = re.sub(r"\b\w+Decoder\b", "a decoder", note)
    return f"{SHORT[kind]}{notes.setdefault(note, len(notes) + 1)}"
