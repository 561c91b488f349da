"""What becomes of every type of a library's models in every mode."""

from __future__ import annotations

import multiprocessing
import re
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import ml
from benchmarks.census.page import keep

__all__ = ["Library", "all_of", "examine", "isolated", "judge"]


class Library(Protocol):
    """A module of the census."""

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


def all_of(library: Library, chosen: Iterable[str], results: dict[str, Any], file: Path | None) -> None:
    """Add to ``results`` what became of the types that are chosen, or of all that they lack."""
    library.quiet()
    for name in chosen or [name for name in library.types() if name not in results]:
        told = library.CANNOT.get(name)
        results[name] = found = isolated(library, name) if told is None else {"": told}
        print(f"{name}: {found.get('', '')}", flush=True)
        for mode, (kind, said) in found.items() if "" not in found else ():
            print(f"    {mode:16} {kind:8} {said[:200]}", flush=True)
        if file is not None:
            keep(results, file)
