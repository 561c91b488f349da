"""The record of a run: training_log.json, from which the picture and the model card are made."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .errors import TrainTinyError

__all__ = ["Log", "write_json"]

Curve = list[tuple[int, float]]


@dataclass(slots=True)
class Log:
    """How a run was started and how it went.

    `train`: (step, nats per token: the mean since the entry before); `heldout`: (step, bits per byte).
    """

    command: str
    machine: str
    seed: int
    batch: int
    seconds: float = 0.0
    train: Curve = field(default_factory=list)
    heldout: Curve = field(default_factory=list)

    @property
    def steps(self) -> int:
        return self.train[-1][0]

    def final_loss(self, entries: int = 10) -> float:
        """Nats per token, over the last entries, because a single one is noisy."""
        last = [loss for _, loss in self.train[-entries:]]
        return sum(last) / len(last)

    def write(self, path: Path, **results: Any) -> None:
        write_json(path, {**results, **asdict(self)})

    @classmethod
    def read(cls, path: Path) -> Log:
        try:
            written = json.loads(path.read_text(encoding="utf-8"))
            return cls(**{f.name: written[f.name] for f in fields(cls)})
        except (OSError, ValueError, KeyError) as e:
            raise TrainTinyError(f"cannot read the log {path}: {e!r}; train first, without --report") from e


def write_json(path: Path, value: Any) -> None:
    """Indented, but with each point of a curve on one line."""
    lines = json.dumps(value, indent=1).replace("[\n   ", "[").replace(",\n   ", ", ").replace("\n  ]", "]")
    path.write_text(lines + "\n", encoding="utf-8")
