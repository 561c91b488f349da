"""``kvcache conformance``: runs the shipped suites on one backend, and shows the results by area."""

from __future__ import annotations

import importlib.util
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import ml
from kvcache_engine.command.completing import backend_names
from kvcache_engine.command.json_output import print_json
from kvcache_engine.command.options import Debug, Device, Json, Quiet, device_options
from kvcache_engine.command.progress import bars_until_done, draws
from kvcache_engine.command.reporting import reported
from kvcache_engine.errors import RunnerError

if TYPE_CHECKING:
    from ml.testing.results import Result, Run, Selection

__all__ = ["conformance", "counted", "record"]

NEEDED = ("pytest", "hypothesis")
COLUMNS = {"pass": "passed", "absent": "absent", "n/a": "not_applicable", "FAIL": "failed"}
"""Outcomes of tests in the suites, and their names in the output."""
HEADS = ("passed", "absent", "n/a", "failed")
MOST = 20
"""The most failures that are listed."""
EVERY_S = 10.0


class Suite(StrEnum):
    """The suites that ship."""

    ALL = "all"
    ML = "ml"
    KVCACHE = "kvcache"
    ENGINE = "engine"

    @property
    def packages(self) -> tuple[str, ...]:
        names = {"ml": "ml.testing", "kvcache": "kvcache.testing", "engine": "kvcache_engine.testing"}
        return (names[self.value],) if self.value in names else tuple(names.values())


def conformance(
    backend: Annotated[
        str,
        typer.Option(
            "--backend",
            help="The backend; kvcache backends lists them.",
            envvar="ML_BACKEND",
            autocompletion=backend_names,
        ),
    ],
    device: Device = None,
    option: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE, an option for ml.open_backend; repeatable.")
    ] = None,
    suite: Annotated[
        Suite, typer.Option(help="The suite of ml, kvcache or kvcache_engine, or all.")
    ] = Suite.ALL,
    keyword: Annotated[
        str | None,
        typer.Option("-k", "--keyword", help="Select tests, as with pytest's -k.", show_default="all"),
    ] = None,
    brief: Annotated[
        bool, typer.Option("--quick", help="Run only the most telling tests, in seconds.")
    ] = False,
    first: Annotated[bool, typer.Option("--exitfirst", "-x", help="Stop at the first failure.")] = False,
    time_limit: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0, max=1e6, help="A test that takes longer fails; 0: no limit."),
    ] = 600.0,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Run the shipped test suites on a backend and count passed tests by area. The full run takes minutes.

    "Absent" counts features that the backend declares missing and refuses.
    Exit code 1 if a test failed, or none passed.

    Example: kvcache conformance --backend numpy --quick -x
    """
    with reported(debug):
        _check_installed()
        options = {**device_options(device), **_pairs(option or ())}
        ml.open_backend(backend, **_opened_with(options)).close()  # reports its errors at once
        from ml.testing.results import Selection

        selection = Selection(
            suite.packages, keyword or "", options,
            isolated=True, quick=brief, first=first, time_limit=time_limit,
        )  # fmt: skip
        run = _run(backend, selection, as_json or quiet, debug)
        if as_json:
            print_json(record(run, selection))
        else:
            _show(run, selection)
        outcomes = {result.outcome for result in run.results}
        if outcomes and not outcomes & {"pass", "FAIL"}:
            typer.echo(f"No test passed: all were skipped, so {backend} has not been tested.", err=True)
        if "FAIL" in outcomes or "pass" not in outcomes:
            raise typer.Exit(1)


def _check_installed() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise RunnerError(
            f"conformance: {' and '.join(missing)} not installed; the suites need: "
            "pip install 'ml-kvcache[testing]'"
        )


def _pairs(options: Sequence[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in options]
    wrong = [text for text, (key, equals, value) in zip(options, pairs, strict=True) if not (key and value)]
    if wrong:
        raise typer.BadParameter(f"--option {wrong[0]}: an option must be KEY=VALUE")
    return {key: value for key, _, value in pairs}


def _opened_with(options: Mapping[str, str]) -> dict[str, Any]:
    """Options converted as by the suites' ``--ml-backend-option``: ``dtype`` becomes a DType."""
    dtype = options.get("dtype")
    if dtype is None:
        return {**options}
    if dtype.upper() not in ml.DType.__members__:
        raise typer.BadParameter(
            f"--option dtype={dtype}: dtype must be one of {', '.join(ml.DType.__members__)}"
        )
    return {**options, "dtype": ml.DType[dtype.upper()]}


def _run(backend: str, selection: Selection, quiet: bool, debug: bool) -> Run:
    """Run the suites. pytest's output is kept for an error message, and shown with ``debug``."""
    from ml.testing.results import NO_TESTS, CrashedError, load, run_suites

    done, began = "before the first test", time.monotonic()
    lines, since = None if quiet or draws(sys.stderr) else _Lines(), _Since()
    with (
        tempfile.TemporaryDirectory() as folder,
        (Path(folder) / "log").open("w+", encoding="utf-8", errors="replace") as log,
        bars_until_done(quiet) as bars,
    ):
        path = Path(folder) / "results.jsonl"

        def told(count: int, total: int, failed: int, at: str) -> None:
            nonlocal done
            if total:
                done = f"after {count} of {total} tests"
                counts = f"{count}/{total}{f', {failed} failed' if failed else ''}"
                since.at(at)
                bars.show("tests", count, total, f"{counts}  {since}")
            if lines is not None:
                where = f", at {since}" if at else ""  # none between collection and the first test
                lines.tell(f"{counts} tests{where}" if total else "collecting the tests")

        try:
            bars.wait("collecting")
            code = run_suites(backend, path, selection, log, told)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"interrupted {done}") from None
        except CrashedError as error:
            without = "; -k 'not TEST' leaves a test out" if error.test else ""
            raise RunnerError(f"conformance: {done}, {error}{without}; --debug shows the output") from error
        except RuntimeError as error:
            raise RunnerError(
                f"conformance: pytest failed {done}: {_last(log)}; --debug shows the output"
            ) from error
        finally:
            bars.stop()
            if debug:
                log.seek(0)
                sys.stderr.write(log.read())
        run = load(path)._replace(seconds=time.monotonic() - began)
        if code == NO_TESTS and not run.tests:
            what = " and ".join(filter(None, ["--quick" * selection.quick, f"-k {selection.keyword!r}"]))
            raise typer.BadParameter(f"{what} selects no test")
        return run


class _Lines:
    """Progress as a line every ten seconds, where nothing can be drawn."""

    def __init__(self) -> None:
        self._next = time.monotonic() + EVERY_S

    def tell(self, text: str) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + EVERY_S
            typer.echo(text, err=True)


class _Since:
    """The running test, and for how long it has been running."""

    def __init__(self) -> None:
        self._what, self._began = "", 0.0

    def at(self, what: str) -> None:
        if what != self._what:
            self._what, self._began = what, time.monotonic()

    def __str__(self) -> str:
        seconds = int(time.monotonic() - self._began)
        return f"{self._what} for {seconds} s" if seconds else self._what


def _last(log: Any) -> str:
    """The last non-empty line of pytest's output."""
    log.seek(0)
    lines = [line.strip() for line in log.read().splitlines() if line.strip()]
    return lines[-1].removeprefix("ERROR: ") if lines else "it printed nothing"


# Output.


def counted(results: Sequence[Result]) -> dict[str, int]:
    """The number of tests by outcome."""
    counts = Counter(result.outcome for result in results)
    return {name: counts[outcome] for outcome, name in COLUMNS.items()}


def record(run: Run, selection: Selection) -> dict[str, Any]:
    """All results as JSON-able data."""
    reasons = Counter(result.reason for result in run.results if result.outcome in ("absent", "n/a"))
    return {
        "backend": run.name,
        "version": run.version,
        "suites": list(selection.suites),
        "keyword": selection.keyword,
        "options": dict(selection.options),
        "quick": selection.quick,
        **counted(run.results),
        "not_run": run.unfinished,
        "seconds": round(run.seconds, 1),
        "areas": [{"area": area, **counted(results)} for area, results in _areas(run).items()],
        "failures": [
            {"area": one.area, "test": one.test, "cases": [*one.cases], "reason": one.reason}
            for one in run.results if one.outcome == "FAIL"
        ],
        "reasons": [{"reason": reason, "tests": count} for reason, count in sorted(reasons.items())],
    }  # fmt: skip


def _areas(run: Run) -> dict[str, list[Result]]:
    """The results by area, in the order of the suites."""
    areas: dict[str, list[Result]] = {}
    for result in run.results:
        areas.setdefault(result.area, []).append(result)
    return areas


def _show(run: Run, selection: Selection) -> None:
    rows: list[tuple[str, Sequence[int]]] = [
        (area, [*counted(results).values()]) for area, results in _areas(run).items()
    ]
    rows.append((run.title, [*counted(run.results).values()]))
    if draws(sys.stdout):
        Console(highlight=False).print(_table(rows))
    else:
        width = max(len(name) for name, _ in rows)
        for name, cells in [("area", HEADS), *rows]:
            typer.echo(f"{name:<{width}}{''.join(f'{cell:>9}' for cell in cells)}")
    failures = [result for result in run.results if result.outcome == "FAIL"]
    typer.echo(f"It took {run.seconds:.0f} s.")
    if run.unfinished:
        typer.echo(f"Stopped at the first failure: {run.unfinished} of {run.tests} tests were not run.")
    for one in failures[:MOST]:
        parameters = f"[{one.cases[0]}]" if one.cases and "cases failed: " not in one.reason else ""
        typer.echo(f"FAILED {one.area}: {one.test}{parameters}: {one.reason}")
    if failures:
        more = f"{len(failures) - MOST} more failed. " if len(failures) > MOST else ""
        typer.echo(f"{more}To run one again: {_command(run.name, selection, failures[0].test)}")


def _table(rows: Sequence[tuple[str, Sequence[int]]]) -> Table:
    table = Table()
    table.add_column("area", overflow="fold")
    for name in HEADS:
        table.add_column(name, justify="right")
    for i, (name, (*counts, failed)) in enumerate(rows):
        last = Text(str(failed), style="bold red" if failed else "")
        if i == len(rows) - 1:
            table.add_section()
        table.add_row(name, *map(str, counts), last)
    return table


def _command(backend: str, selection: Selection, test: str) -> str:
    chosen = [f"--ml-backend-option={key}={value}" for key, value in selection.options.items()]
    words = ["pytest", "--pyargs", *selection.suites, f"--ml-backend={backend}", *chosen, "-k", test]
    return shlex.join(words)
