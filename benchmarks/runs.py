"""Records of what commands of the docs print: ``python -m benchmarks.runs NAME COMMAND`` keeps one.

``python -m benchmarks.runs NAME ...`` runs the commands of these records again, and without a name those of
all. Tables and sentences of the docs are filled from the records (``benchmarks.site``).
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import DOCS, ROOT, load, provenance, save
from benchmarks.timing import processor_seconds

RUNS = DOCS / "benchmarks" / "runs"


def run(command: str) -> dict[str, Any]:
    """Run a command now. In its record, ``processor`` is the time of the processor that it took, in seconds,
    and ``foreign_cores`` what other processes kept busy meanwhile.
    """
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    record = provenance(command)
    began, busy, own = time.perf_counter(), processor_seconds(), _children()
    done = subprocess.run(
        command,
        shell=True,
        cwd=ROOT,
        env=os.environ | {"PATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    seconds, used = time.perf_counter() - began, _children() - own
    if busy is not None:
        record["foreign_cores"] = max(0.0, ((processor_seconds() or 0.0) - busy - used) / seconds)
    return record | {"seconds": seconds, "processor": used, "printed": done.stdout.splitlines()}


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def tables(record: Mapping[str, Any]) -> list[list[list[str]]]:
    """The tables that a command printed: rows of cells, the head first."""
    found: list[list[list[str]]] = []
    before = ""
    for line in record["printed"]:
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if not before.startswith("|"):
                found.append([])
            if "---" not in line:
                found[-1].append(cells)
        before = line
    return found


def fields(name: str) -> dict[str, Any]:
    """A record with the cells that were printed: ``tables``, and ``cells`` by row and column.

    A row is named by its first cell, and is a cell itself where it has one more.
    """
    record = load(RUNS / f"{name}.json")
    found: dict[str, Any] = {}
    for head, *rows in (printed := tables(record)):
        for label, *cells in rows:
            found[label] = dict(zip(head[1:], cells, strict=False)) if len(head) > 2 else cells[0]
    return record | {"tables": printed, "cells": found}


def main(arguments: Sequence[str]) -> None:
    names = arguments or sorted(path.stem for path in RUNS.glob("*.json"))
    commands = {name: str(load(RUNS / f"{name}.json").get("command")) for name in names}
    if len(arguments) > 1 and " " in arguments[1]:
        commands = {arguments[0]: arguments[1]}
    for name, command in commands.items():
        print(f"{name}: {command}", flush=True)
        save(RUNS / f"{name}.json", run(command))


if __name__ == "__main__":
    main(sys.argv[1:])
