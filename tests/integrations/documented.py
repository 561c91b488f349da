"""The versions that docs/versions.md says were run."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "versions.md"


def documented(package: str) -> str:
    """The newest version of a package in the table of tested versions."""
    (row,) = re.findall(
        rf"^\| {package} \|.*\| ([\d.]+)[^|]*\|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    return str(row)
