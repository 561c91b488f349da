"""The loss curve picture."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib.figure import Figure

from .train import Log

__all__ = ["draw_loss"]

TRAIN, HELD_OUT = "#4c78a8", "#e4572e"


def draw_loss(path: Path, log: Log, nats_to_bpb: float, title: str) -> None:
    """Draw both curves in bits per byte; `nats_to_bpb` turns a training loss in nats per token into bits per byte."""
    matplotlib.rcParams["svg.hashsalt"] = "train_tiny"  # the same log gives the same file
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([s for s, _ in log.train], [v * nats_to_bpb for _, v in log.train], color=TRAIN, lw=1, label="training")
    axes.plot(*zip(*log.heldout, strict=True), color=HELD_OUT, lw=1.5, marker="o", ms=3, label="held out")
    last_step, last = log.heldout[-1]
    axes.annotate(f"{last:.3f}", (last_step, last), textcoords="offset points", xytext=(0, 8), ha="right")
    axes.set(xlabel="step", ylabel="bits per byte", title=title)
    axes.set_ylim(top=min(max(v for _, v in log.train) * nats_to_bpb, 3.0))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})
