"""The text: chapters of verses, one verse a line, and which chapters are held out.

Debian ships the King James Bible compressed in `/usr/lib/bible.data` (package bible-kjv-text); its reader
`bible` (package bible-kjv) prints it as `Ge1:1 In the beginning ...`, one verse a line.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from .errors import TrainTinyError

__all__ = ["Corpus", "read_bible", "read_text"]

INSTALL = "apt-get install -y bible-kjv bible-kjv-text"
WHOLE_BIBLE = "Gen1:1-Rev22:21"
CHAPTERS, VERSES = 1189, 31102
SOURCE = "King James Bible (Debian's bible-kjv-text)"
LICENCE = (
    "Book names and verse numbers are left out.\n"
    "The translation is of 1611 and in the public domain: Debian's copyright file says that its copyright "
    "is expired. (In the United Kingdom, printing it remains a prerogative of the Crown.)"
)
VERSE = re.compile(r"(\d?[A-Za-z]+\d+):\d+ (.+)")
HELD_OUT_EVERY = 20
SHIPPED_EVERY = 4


@dataclass(frozen=True, slots=True)
class Corpus:
    """Chapters in reading order; every 20th (the 20th, the 40th, ...) is held out and never trained on."""

    source: str
    licence: str
    chapters: tuple[str, ...]

    @property
    def stride(self) -> int:
        return min(HELD_OUT_EVERY, len(self.chapters))

    @property
    def heldout(self) -> tuple[str, ...]:
        return self.chapters[self.stride - 1 :: self.stride]

    @property
    def shipped(self) -> tuple[str, ...]:
        """Every fourth of the held-out chapters: small enough to ship as heldout.txt."""
        return self.heldout[::SHIPPED_EVERY]

    @property
    def train(self) -> tuple[str, ...]:
        return tuple(text for i, text in enumerate(self.chapters) if (i + 1) % self.stride)


def read_bible() -> Corpus:
    """The King James Bible, 1189 chapters, without book names and verse numbers."""
    verses = parse_verses(print_bible())
    groups = groupby(verses, key=itemgetter(0))
    chapters = tuple("\n".join(verse for _, verse in group) for _, group in groups)
    if (len(chapters), len(verses)) != (CHAPTERS, VERSES):
        raise TrainTinyError(
            f"`bible` printed {len(chapters)} chapters, {len(verses)} verses, not {CHAPTERS}, {VERSES}; "
            f"is it Debian's? {INSTALL}"
        )
    return Corpus(SOURCE, LICENCE, chapters)


def print_bible() -> str:
    program = shutil.which("bible")
    if program is None:
        raise TrainTinyError(
            f"the program `bible` is not installed: {INSTALL}, or give a text with --text FILE"
        )
    command = [program, "-f", WHOLE_BIBLE]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if result.returncode:
        reason = result.stderr.strip() or f"exit status {result.returncode}"
        raise TrainTinyError(f"`{' '.join(command)}` failed: {reason}; {INSTALL}")
    return result.stdout


def parse_verses(printed: str) -> list[tuple[str, str]]:
    """(`Ge1`, `In the beginning ...`) for each line `Ge1:1 In the beginning ...`; other lines are dropped."""
    return [(m[1], m[2].strip()) for m in map(VERSE.fullmatch, printed.splitlines()) if m]


def read_text(path: Path) -> Corpus:
    """Any text: a chapter is what lies between blank lines, a verse is a line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise TrainTinyError(f"--text {path}: {e}") from e
    chapters = tuple(chapter.strip("\n") for chapter in re.split(r"\n\s*\n", text) if chapter.strip())
    if len(chapters) < 2:
        raise TrainTinyError(
            f"--text {path}: {len(chapters)} chapters (blank lines part them), at least 2 are needed"
        )
    return Corpus(path.name, "Its licence is that of the file.", chapters)
