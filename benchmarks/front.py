"""The front page's plot, from the figures of ``benchmarks.two_hosts``: ``python -m benchmarks.front``."""

from __future__ import annotations

from pathlib import Path

from benchmarks import two_hosts_report
from benchmarks.pages import DOCS

FILE = DOCS / "first-token.svg"
MODEL = "random Llama of 0.3 billion parameters, one CPU core"
WIDTH, ROW, TOP, LEFT, RIGHT = 640, 58, 74, 16, 110
BARS = (("computed again", None), ("fetched from another host, 1 Gb/s", 1.0), ("fetched, 10 Gb/s", 10.0))
STYLE = "text{font:20px system-ui,sans-serif;fill:#7d8590}.b{font-weight:600}.s{font-size:16px}"
"""A grey that reads on white and on black, since a picture in a page does not know the page's scheme."""


def drawn(docs: Path = DOCS) -> str:
    """Seconds to the first token of the longest prompt that was measured on the larger model, as bars."""
    record = two_hosts_report.load(docs)["models"]["llama"]
    point = two_hosts_report.points_of(record)[-1]
    seconds = [point.computed if link is None else point.restored[link] for _, link in BARS]
    scale = (WIDTH - LEFT - RIGHT) / max(seconds)
    title = f"Time to the first token, {point.tokens:,} tokens known"
    lines = [
        f'<text x="{LEFT}" y="30" class="b">{title}</text>',
        f'<text x="{LEFT}" y="54" class="s">{MODEL}</text>',
    ]
    for i, ((label, link), taken) in enumerate(zip(BARS, seconds, strict=True)):
        y, width = TOP + i * ROW, max(4, taken * scale)
        color = "#8b949e" if link is None else "#3b82f6"
        lines += [
            f'<text x="{LEFT}" y="{y + 18}">{label}</text>',
            f'<rect x="{LEFT}" y="{y + 26}" width="{width:.0f}" height="18" rx="3" fill="{color}"/>',
            f'<text x="{LEFT + width + 10:.0f}" y="{y + 42}" class="b">{taken:.2g} s</text>',
        ]
    height = TOP + len(BARS) * ROW + 4
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="520" viewBox="0 0 {WIDTH} {height}" role="img">'
    return "\n".join([head, f"<style>{STYLE}</style>", *lines, "</svg>"]) + "\n"


def write(docs: Path = DOCS) -> None:
    """Draw it anew, where the larger model was measured."""
    if "llama" in two_hosts_report.load(docs)["models"]:
        (docs / FILE.name).write_text(drawn(docs), encoding="utf-8")


if __name__ == "__main__":
    write()
