"""The machine that figures are measured on, and how busy others kept it; trials of several draws as one."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvcache.testing.bench import Trial


def joined(trials: Sequence[Trial], floors: Sequence[str]) -> Trial:
    """Trials of the same contenders as one; the floor is the fastest of ``floors`` over all of them. If times
    depend on the addresses of buffers, each trial with new buffers is one draw.
    """
    names = trials[0].times
    times = {name: [value for trial in trials for value in trial.times[name]] for name in names}
    floor = min(floors, key=lambda name: statistics.median(times[name]))
    return Trial(times, sum(trial.dropped for trial in trials), floor)


@dataclass(slots=True)
class Foreign:
    """The other processes' use of the machine since creation (Linux; None elsewhere)."""

    wall: float = field(default_factory=time.perf_counter)
    own: float = field(default_factory=time.process_time)
    busy: float | None = field(default_factory=lambda: processor_seconds())

    def cores(self) -> float | None:
        """The average number of cores that other processes kept busy."""
        now = processor_seconds()
        if now is None or self.busy is None:
            return None
        used = now - self.busy - (time.process_time() - self.own)
        return max(0.0, used / max(1e-9, time.perf_counter() - self.wall))


def processor_seconds() -> float | None:
    """The busy time of all cores, in seconds."""
    try:
        first = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
        idle = int(first[4]) + int(first[5])
        return (sum(map(int, first[1:9])) - idle) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return None


def machine() -> str:
    """One line: processor, cores, system and Python."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{name}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
