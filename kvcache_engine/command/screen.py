"""The output during generation: a live screen on a terminal, else plain text. Text goes to stdout, bars to
stderr. With ``quiet``, only the text is shown.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvcache import bytes_text
from kvcache.views.words import counted
from kvcache_engine.command.answers import Answer, Answers
from kvcache_engine.command.drafting import speculation_record, speculation_rows
from kvcache_engine.command.json_output import print_json, statistics_record
from kvcache_engine.command.progress import Bars, bars_for, draws
from kvcache_engine.requests import Event, Prefilled, Started, Statistics, Token
from kvcache_engine.verification import Speculation

__all__ = ["JsonScreen", "LiveScreen", "PlainScreen", "Screen", "Totals", "screen_for", "summary_rows"]


_TABLE_WIDTH = 40
"""The columns that the summary's table needs; on narrower terminals, its rows are plain lines."""


class Screen:
    """The output of a generation. This base class shows nothing; it is used for ranks other than 0. ``stop``
    is always called, ``finish`` only after success.
    """

    def loading(self, done: int, total: int) -> None:
        """``done`` of ``total`` tensors of the model are loaded."""

    def event(self, event: Event) -> None:
        """Show the next event."""

    def stop(self) -> None:
        """Restore the terminal."""

    def abandon(self, totals: Statistics, cache_bytes: int) -> None:
        """After an early end, show the generated parts of answers not shown yet."""

    def finish(self, totals: Statistics, cache_bytes: int, drafts: Speculation | None = None) -> None:
        """Show the answers not shown yet, and the summary, with statistics of ``drafts``."""


def summary_rows(
    totals: Statistics, cache_bytes: int, drafts: Speculation | None = None
) -> list[tuple[str, str]]:
    return [
        ("tokens reused", f"{totals.reused_tokens}"),
        ("tokens computed", f"{totals.computed_tokens}"),
        ("tokens generated", f"{totals.generated_tokens}"),
        ("prefill", f"{totals.prefill_tokens_per_second:.1f} tokens/s"),
        ("decode", f"{totals.decode_tokens_per_second:.1f} tokens/s"),
        *(() if drafts is None else speculation_rows(drafts)),
        ("cache", bytes_text(cache_bytes)),
    ]


def stopped(answer: Answer) -> str:
    return f"[stopped after {counted(len(answer.tokens), 'token')}]"


def _lines(rows: Sequence[tuple[str, str]]) -> str:
    return "".join(f"{name:<17} {value}\n" for name, value in rows)


class Totals:
    """The running sums of the progress line."""

    def __init__(self) -> None:
        self.reused = 0
        self.computed = 0
        self.generated = 0
        self.finished = 0
        self._done: dict[int, int] = {}
        self._total: dict[int, int] = {}
        self._began = 0.0

    def take(self, event: Event) -> None:
        if isinstance(event, Started):
            self.reused += event.reused
            self._done[event.request], self._total[event.request] = event.reused, event.prompt_tokens
        elif isinstance(event, Prefilled):
            self.computed += event.done - self._done[event.request]
            self._done[event.request] = event.done
        elif isinstance(event, Token):
            self._began = self._began or time.perf_counter()
            self.generated += event.token is not None
        else:
            self.finished += 1

    def line(self, requests: int) -> str:
        """'12 tokens · 45.3 tok/s · prompt 30/30 · reused 8 · computed 22'."""
        elapsed = time.perf_counter() - self._began if self._began else 0.0
        rate = f"{self.generated / elapsed:.1f} tok/s" if elapsed > 0 else "- tok/s"
        prompt = f"prompt {sum(self._done.values())}/{sum(self._total.values())}"
        done = f"{self.finished}/{requests} done · " if requests > 1 else ""
        counts = f"reused {self.reused} · computed {self.computed}"
        return f"{done}{counted(self.generated, 'token')} · {rate} · {prompt} · {counts}"


class _TextScreen(Screen):
    """Shared by plain and live screens: bars, complete answers, the summary."""

    def __init__(self, prompts: Sequence[str], bars: Bars | None, quiet: bool) -> None:
        self._prompts = prompts
        self._answers = Answers(prompts)
        self._bars = bars or Bars(None)
        self._quiet = quiet

    def loading(self, done: int, total: int) -> None:
        self._bars.loading(done, total)

    def abandon(self, totals: Statistics, cache_bytes: int) -> None:
        self._show(self._answers.rest())

    def finish(self, totals: Statistics, cache_bytes: int, drafts: Speculation | None = None) -> None:
        if not self._quiet:
            self._summarize(summary_rows(totals, cache_bytes, drafts))

    def _show(self, answers: Iterable[Answer]) -> None:
        raise NotImplementedError

    def _summarize(self, rows: Sequence[tuple[str, str]]) -> None:
        raise NotImplementedError


class PlainScreen(_TextScreen):
    """Without a terminal: the text of one prompt as it arrives, of several in complete blocks; then the
    summary.
    """

    def __init__(self, prompts: Sequence[str], bars: Bars | None = None, quiet: bool = False) -> None:
        super().__init__(prompts, bars, quiet)
        self._open = False

    def event(self, event: Event) -> None:
        self._bars.event(event)
        if len(self._prompts) > 1:
            self._answers.take(event)
            self._show(self._answers.ready())
        elif isinstance(event, Started):
            self._write(self._prompts[0])
        elif isinstance(event, Token):
            self._write(event.text)

    def stop(self) -> None:
        self._bars.stop()
        if self._open:
            self._write("\n")
            self._open = False

    def _summarize(self, rows: Sequence[tuple[str, str]]) -> None:
        self._write("\n" if len(self._prompts) == 1 else "")
        self._write(_lines(rows))

    def _show(self, answers: Iterable[Answer]) -> None:
        for answer in answers:
            end = "" if answer.finished else f"\n{stopped(answer)}"
            self._write(f"[{answer.number + 1}] {answer.prompt}{answer.so_far.text}{end}\n\n")

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
        if text:
            self._open = not text.endswith("\n")


class JsonScreen(Screen):
    """Only one JSON object, at the end."""

    def __init__(self, prompts: Sequence[str], head: dict[str, Any]) -> None:
        self._answers = Answers(prompts)
        self._head = head

    def event(self, event: Event) -> None:
        self._answers.take(event)

    def abandon(self, totals: Statistics, cache_bytes: int) -> None:
        if self._answers.begun:
            self.finish(totals, cache_bytes)

    def finish(self, totals: Statistics, cache_bytes: int, drafts: Speculation | None = None) -> None:
        statistics = statistics_record(totals, cache_bytes)
        if drafts is not None:
            statistics["speculation"] = speculation_record(drafts)
        print_json({**self._head, "outputs": self._answers.records(), "statistics": statistics})


class LiveScreen(_TextScreen):
    """On a terminal: bars until there is text, then the text above a progress line. Complete lines are
    printed above the live part, which consists of the current line and the progress line, so a long text
    scrolls normally.
    """

    def __init__(
        self, prompts: Sequence[str], console: Console, bars: Bars | None = None, quiet: bool = False
    ) -> None:
        super().__init__(prompts, bars, quiet)
        self._console = console
        self._totals = Totals()
        self._whole: list[str] = []
        """Lines of the prompt, shown with the first token, when the bars have gone."""
        self._line = ""
        self._live: Live | None = None

    def event(self, event: Event) -> None:
        self._totals.take(event)
        if len(self._prompts) == 1:
            if isinstance(event, Started):
                self._whole += self._text(self._prompts[0])
            elif isinstance(event, Token):
                self._whole += self._text(event.text)
        else:
            self._answers.take(event)
            self._show(self._answers.ready())
        if self._live is None and isinstance(event, (Started, Prefilled)):
            self._bars.event(event)
        else:
            self._draw()

    def _draw(self) -> None:
        if self._live is None:
            self._bars.stop()
            self._live = Live(console=self._console, transient=True, refresh_per_second=12)
            self._live.start()
        line = "" if self._quiet else self._totals.line(len(self._prompts))
        status = Text(line, style="dim", no_wrap=True, overflow="ellipsis")
        self._live.update(Group(Text(self._line), status) if self._line else status)
        self._print_whole()  # after the update, so that the next refresh draws it below them

    def _print_whole(self) -> None:
        whole, self._whole = self._whole, []
        for line in whole:
            self._console.print(Text(line))

    def stop(self) -> None:
        self._bars.stop()
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._print_whole()
        if self._line:
            self._console.print(Text(self._line))
            self._line = ""

    def _summarize(self, rows: Sequence[tuple[str, str]]) -> None:
        if self._console.width < _TABLE_WIDTH:
            self._console.print(Text(_lines(rows), end=""))
            return
        table = Table(show_header=False)
        table.add_column(style="dim")
        table.add_column(justify="right")
        for name, value in rows:
            table.add_row(name, value)
        self._console.print(table)

    def _show(self, answers: Iterable[Answer]) -> None:
        for answer in answers:
            so_far = answer.so_far
            end = "" if answer.finished else f"\n{stopped(answer)}"
            body = Text.assemble((answer.prompt, "bold"), so_far.text, (end, "dim"))
            title = f"{answer.number + 1} · reused {so_far.reused} · computed {so_far.computed}"
            self._console.print(Panel(body, title=title, title_align="left"))

    def _text(self, text: str) -> list[str]:
        """Print the lines that ``text`` completes; the rest stays the live line."""
        *whole, line = (self._line + text).split("\n")
        width = max(2, self._console.width)  # at least one character per line is taken
        while len(line) >= width:  # rich would wrap it: print full lines, and keep the rest live
            cut = line.rfind(" ", 0, width)
            cut = cut if cut > 0 else width - 1
            whole.append(line[:cut])
            line = line[cut:].removeprefix(" ")
        self._line = line
        return whole


def screen_for(prompts: Sequence[str], as_json: bool, head: dict[str, Any], quiet: bool = False) -> Screen:
    """A live screen if stdout is a terminal that supports it; else plain text, or one JSON object."""
    if as_json:
        return JsonScreen(prompts, head)
    bars = bars_for(quiet, len(prompts))
    if not draws(sys.stdout):
        return PlainScreen(prompts, bars, quiet)
    return LiveScreen(prompts, Console(highlight=False, soft_wrap=False), bars, quiet)
