"""The loss curve picture."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from .log import Log

__all__ = ["draw_loss"]

TRAIN, HELD_OUT = "#4c78a8", "#e4572e"
TOP = 2.5  # bits per byte; the first steps lie above and would flatten the rest


def draw_loss(path: Path, log: Log, to_bpb: float, title: str) -> None:
    """Draw both curves in bits per byte; `to_bpb` turns nats per training token into bits per byte."""
    matplotlib.rcParams["svg.hashsalt"] = "train_tiny"  # the same log gives the same file
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    steps, losses = zip(*log.train, strict=True)
    axes.plot(steps, [loss * to_bpb for loss in losses], color=TRAIN, lw=1, label="training (last 10 steps)")
    axes.plot(*zip(*log.heldout, strict=True), color=HELD_OUT, lw=1.5, marker="o", ms=3, label="heldout.txt")
    end, last = log.heldout[-1]
    axes.annotate(
        f"{last:.3f}", (end, last), textcoords="offset points", xytext=(0, 8), ha="right", color=HELD_OUT
    )
    axes.set(xlabel="step", ylabel="bits per byte", title=title)
    if log.final_loss() * to_bpb < TOP:
        axes.set_ylim(top=TOP)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})
