"""What a stage has found so far, in a file that is whole at any moment."""

from __future__ import annotations

import functools
import gc
import importlib.util
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import ml

ROOT = Path(__file__).resolve().parents[2]
T = TypeVar("T")


class Skipped(Exception):  # noqa: N818
    """A step cannot run here; the message says why."""


def needs(*modules: str) -> None:
    """Skip the step where one of these is not installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise Skipped(f"{', '.join(missing)} is not installed")


def needs_backend(name: str) -> None:
    info = next((info for info in ml.available_backends() if info.name == name), None)
    if info is None:
        raise Skipped(
            f"no backend {name!r} is installed: install a wheel of this project, a checkout has none"
        )
    if not info.available:
        raise Skipped(f"{name} cannot run here: {info.reason}")


@dataclass(frozen=True)
class Options:
    """``stories``: a folder of stories260K, where one was named. ``only``: a part of the names of steps."""

    out: Path
    device: str = "cuda"
    quick: bool = False
    seconds: float = 520.0
    stories: Path | None = None
    only: str = ""


@dataclass
class Stage:
    """One stage's record; its steps note what they find, and it is written after each note."""

    letter: str
    options: Options
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    goals: list[dict[str, Any]] = field(default_factory=list)
    result: str = "running"
    began: float = field(default_factory=time.monotonic)

    @property
    def path(self) -> Path:
        return self.options.out / f"{self.letter}.json"

    @property
    def quick(self) -> bool:
        return self.options.quick

    @functools.cached_property
    def device(self) -> Any:
        """A ``benchmarks.gpu.device.Device``. The step is skipped where PyTorch's backend cannot run."""
        needs_backend("torch")
        from benchmarks.gpu.device import Device

        return Device(self.options.device, self.quick)

    @property
    def left(self) -> float:
        """Seconds of the stage that are left."""
        return self.options.seconds - (time.monotonic() - self.began)

    def run(self, steps: Mapping[str, Callable[[Stage], object]]) -> str:
        """Take all steps, whatever becomes of each.

        The result is "ok", "failed", "ok, skipped: <names>", or "skipped: <reason>" where nothing could run.
        """
        for name, step in steps.items():
            if self.options.only in name:
                self._take(name, step)
        results = {name: entry["result"] for name, entry in self.steps.items()}
        skipped = [name for name, result in results.items() if result.startswith("skipped")]
        if not results:
            self.result = f"skipped: no step is named like {self.options.only!r}"
        elif "failed" in results.values():
            self.result = "failed"
        elif len(skipped) == len(results):
            self.result = results[skipped[0]]
        else:
            self.result = f"ok, skipped: {', '.join(skipped)}" if skipped else "ok"
        self.save()
        return self.result

    def _take(self, name: str, step: Callable[[Stage], object]) -> None:
        began, entry = time.monotonic(), {"result": "running", "found": {}, "errors": {}}
        self.steps[name] = entry
        self.save()
        try:
            if self.left <= 0:
                raise Skipped(
                    f"the {self.options.seconds:g} seconds of the stage are over; run it with --step"
                )
            step(self)
            entry["result"] = "failed" if entry["errors"] else "ok"
        except Skipped as skipped:
            entry["result"] = "failed" if entry["errors"] else f"skipped: {skipped}"
        except BaseException as error:
            entry["result"] = "failed"
            entry["errors"][name] = traceback.format_exc()
            if not isinstance(error, Exception):
                self.result = "failed"
                raise
        finally:
            entry["seconds"] = round(time.monotonic() - began, 3)
            self.save()
            print(f"{self.letter}: {name}: {entry['result']} ({entry['seconds']:.1f} s)", flush=True)
            _let_go()

    @property
    def _entry(self) -> dict[str, Any]:
        return next(reversed(self.steps.values()))

    def note(self, name: str, value: Any) -> None:
        """Keep something that the step has found."""
        self._entry["found"][name] = value
        self.save()

    def attempt(self, name: str, part: Callable[[], T]) -> T | None:
        """A part without which the rest of the step goes on; where it fails, so has the step in the end."""
        try:
            return part()
        except Skipped as skipped:
            self.note(name, f"skipped: {skipped}")
        except Exception:
            self._entry["errors"][name] = traceback.format_exc()
            self.save()
        finally:
            _let_go()
        return None

    def goal(self, name: str, figure: float, limit: float, at_most: bool = True) -> None:
        """Hold a figure to what is aimed at. A goal that is missed is no failure."""
        met = figure <= limit if at_most else figure >= limit
        wanted = f"at {'most' if at_most else 'least'} {limit:g}"
        self.goals.append({"goal": name, "figure": figure, "wanted": wanted, "met": met})
        self.save()

    def save(self) -> None:
        """Write it all, so that a reader finds the former record or this one, never a part."""
        shown = {"stage": self.letter, "device": self.options.device, "quick": self.quick}
        shown |= {"result": self.result, "goals": self.goals, "steps": self.steps}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(shown, indent=1, default=str) + "\n", encoding="utf-8")
        new.replace(self.path)


def _let_go() -> None:
    """Free what a part has held of the device."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
