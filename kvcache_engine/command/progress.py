"""Progress bars on stderr for work before the first text: loading, restoring, evaluating prompts."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from kvcache import bytes_text
from kvcache_engine.requests import Event, Finished, Prefilled, Started

__all__ = ["Bars", "bars_for", "bars_until_done", "draws"]


def draws(stream: Any) -> bool:
    """Whether lines can be redrawn: on a terminal that is not dumb."""
    return bool(stream.isatty()) and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def bars_for(quiet: bool, requests: int = 1) -> Bars:
    """Bars if stderr is a terminal that can draw them."""
    shown = not quiet and draws(sys.stderr)
    return Bars(Console(stderr=True, highlight=False) if shown else None, requests)


@contextlib.contextmanager
def bars_until_done(quiet: bool) -> Iterator[Bars]:
    """``bars_for`` as a context manager, which always restores the terminal."""
    bars = bars_for(quiet)
    try:
        yield bars
    finally:
        bars.stop()


class Bars:
    """One bar at a time, on the last line of the terminal; it disappears when its work is done. None: no
    bars. With one prompt, the bar of prompts ends with the first token of the answer, which is shown from
    then on; with several, it continues and counts finished prompts.
    """

    def __init__(self, console: Console | None, requests: int = 1) -> None:
        self._console = console
        self._requests = requests
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._what = ""
        self._prompts: dict[int, tuple[int, int]] = {}
        self._finished = 0

    def show(self, what: str, done: int, total: int, counts: str) -> None:
        """Show ``done`` of ``total`` with this text; the bar disappears at the end."""
        if self._console is None:
            return
        if done >= total:
            self.stop()
            return
        if self._progress is None or what != self._what:
            self._start(what, total)
        assert self._progress is not None
        assert self._task is not None
        self._progress.update(self._task, completed=done, total=total, counts=counts)

    def wait(self, what: str) -> None:
        """Show a bar without a known end."""
        if self._console is not None and what != self._what:
            self._start(what, None)

    def loading(self, done: int, total: int) -> None:
        """``done`` of ``total`` tensors of the model."""
        self.show("loading", done, total, f"{done}/{total} tensors")

    def reading(self, done: int, total: int) -> None:
        """``done`` of ``total`` bytes of a file, which is checked after it is read."""
        if done < total:
            self.show("restoring", done, total, f"{bytes_text(done)} of {bytes_text(total)}")
        else:
            self.wait("checking")

    def checked(self, done: int, total: int) -> None:
        """``done`` of ``total`` bytes of a store's entries have been checked."""
        self.show("checking", done, total, f"{bytes_text(done)} of {bytes_text(total)}")

    def restored(self, done: int, total: int) -> None:
        """``done`` of the ``total`` tokens of a prefix have been restored."""
        self.show("restoring", done, total, f"{done}/{total} tokens")

    def event(self, event: Event) -> None:
        """Show the progress of prompts and answers."""
        if isinstance(event, Started):
            self._prompts[event.request] = event.reused, event.prompt_tokens
        elif isinstance(event, Prefilled):
            self._prompts[event.request] = event.done, event.total
        elif self._requests == 1:
            self.stop()
            return
        else:
            self._finished += isinstance(event, Finished)
        self._show_prompts()

    def _show_prompts(self) -> None:
        done = sum(done for done, _ in self._prompts.values())
        total = sum(total for _, total in self._prompts.values())
        if done < total:
            self.show("prompt", done, total, f"{done}/{total} tokens")
        elif self._requests > 1:
            self.show("answers", self._finished, self._requests, f"{self._finished}/{self._requests}")
        else:
            self.stop()

    def stop(self) -> None:
        """Restore the terminal."""
        if self._progress is not None:
            self._progress.stop()
        self._progress, self._task, self._what = None, None, ""

    def _start(self, what: str, total: int | None) -> None:
        self.stop()
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[counts]}"))
        self._progress = Progress(
            *columns, console=self._console, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._what = what
        self._task = self._progress.add_task(what, total=total, counts="")
        self._progress.start()
