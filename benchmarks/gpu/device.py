"""Time, copies, kernels and graphs of a device; a CPU has twins of what CUDA has."""

from __future__ import annotations

import collections
import functools
import statistics
import time
import warnings
from collections.abc import Callable, Mapping

import torch

import ml
from kvcache.testing.bench import Contender, interleave

Timed = dict[str, dict[str, float]]
SYNCS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Calls that wait for the device, as the profiler names them."""
SHEET = {"H200": 4.8e12, "H100 80GB HBM3": 3.35e12, "H100 PCIe": 2.0e12, "A100-SXM4-80GB": 2.039e12}
"""Bytes per second of memory, from data sheets, by what the device's name contains."""


class _Moment:
    """A CPU's event: what is called has happened when the call returns."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: _Moment) -> float:
        return (end.at - self.at) * 1e3


class Device:
    def __init__(self, name: str, quick: bool = False) -> None:
        self.name, self.quick = name, quick
        self.torch = torch.device(name)
        self.cuda = self.torch.type == "cuda"

    @functools.cached_property
    def _flush(self) -> torch.Tensor:
        return torch.empty(1 << (30 if self.cuda else 10), dtype=torch.uint8, device=self.torch)

    def open(self) -> ml.Backend:
        return ml.open_backend("torch", device=self.name)

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.torch)

    def compare(
        self, contenders: Mapping[str, Contender], floors: tuple[str, ...] = (), rounds: int = 30
    ) -> Timed:
        """Microseconds of a call by events, and by the wall up to the end of its work; ratios to the floor.

        Between events the device is behind the host, and none of what is read lies in its caches.
        """
        rounds = 2 if self.quick else rounds
        walls = interleave(
            {name: self._waited(contender) for name, contender in contenders.items()},
            rounds, warmup=1 if self.quick else 3, floors=floors, seconds=10, own_threads=not self.cuda,
        ).samples()  # fmt: skip
        spans: dict[str, list[float]] = {
            name: [self._span(c) for _ in range(rounds)] for name, c in contenders.items()
        }
        events = {name: statistics.median(found) for name, found in spans.items()}
        least = min(events[name] for name in floors or list(events)[:1])
        return {
            name: {
                "event_us": events[name], "event_least_us": min(spans[name]),
                "event_ratio": events[name] / least, "wall_us": wall.median, "wall_low_us": wall.low,
                "wall_high_us": wall.high, "wall_ratio": wall.ratio,
            }
            for name, wall in walls.items()
        }  # fmt: skip

    def _waited(self, plain: Contender) -> Contender:
        def after(part: Callable[[], object]) -> Callable[[], None]:
            def call() -> None:
                part()
                self.synchronize()

            return call

        return Contender(after(plain.call), after(plain.prepare), plain.finish)

    def _span(self, contender: Contender) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) if self.cuda else _Moment() for _ in range(2))
        contender.prepare()
        self._flush.zero_()
        start.record()
        contender.call()
        end.record()
        contender.finish()
        self.synchronize()
        return start.elapsed_time(end) * 1e3

    # Copies.

    def copies(self, nbytes: int) -> dict[str, float]:
        """Bytes per second: read and written by a copy on the device; moved from and to the host."""
        here, there = (torch.zeros(nbytes, dtype=torch.uint8, device=self.torch) for _ in range(2))
        ways = {"device": (here, there, 2)}
        for kind in ("pinned", "pageable"):
            host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=self.cuda and kind == "pinned")
            ways |= {f"{kind}, to host": (here, host, 1), f"{kind}, to device": (host, here, 1)}
        found = self.compare({name: _copy(*pair) for name, (*pair, _) in ways.items()}, rounds=10)
        return {name: ways[name][2] * nbytes / times["wall_us"] * 1e6 for name, times in found.items()}

    def peak(self) -> dict[str, float]:
        """Bytes per second of the device's memory: measured by a copy, and of the data sheet where known."""
        found = {"copy": self.copies(1 << (16 if self.quick else 31))["device"]}
        if self.cuda:
            name = torch.cuda.get_device_name(self.torch)
            found.update(("data sheet", rate) for part, rate in SHEET.items() if part in name)
        return found

    def free(self) -> int:
        """Bytes that can be taken; on a CPU, as many as a quick run may take."""
        return torch.cuda.mem_get_info(self.torch)[0] if self.cuda else 1 << 30

    # Kernels.

    def kernels(self, call: Callable[[], object]) -> tuple[dict[str, list[float]], int]:
        """Microseconds of each kernel by name (on a CPU: each operation), and how often the host waited."""
        kinds = [torch.profiler.ProfilerActivity.CPU]
        kinds += [torch.profiler.ProfilerActivity.CUDA] if self.cuda else []
        self.synchronize()
        with torch.profiler.profile(activities=kinds) as profile:
            call()
            self.synchronize()
        found: dict[str, list[float]] = collections.defaultdict(list)
        waits = 0
        for event in profile.events():
            waits += event.name in SYNCS
            if self.cuda and event.device_type == torch.autograd.DeviceType.CUDA:
                if not getattr(event, "is_user_annotation", False):
                    found[event.name].append(float(event.time_range.elapsed_us()))
            elif not self.cuda and event.cpu_parent is None and event.name.startswith("aten::"):
                found[event.name].append(float(event.time_range.elapsed_us()))
        if not found:
            raise RuntimeError(f"the profiler saw no kernel on {self.name}; may it read CUPTI here?")
        return found, waits

    def per_step(self, step: Callable[[], object], steps: int = 4) -> dict[str, float]:
        """Launches, waits and warnings of waits in one step: what twice as many steps have more."""
        step()
        counts = []
        for number in (steps, 2 * steps):
            found, waits = self.kernels(lambda number=number: [step() for _ in range(number)])
            counts.append((sum(map(len, found.values())), waits))
        (launches, waits), (twice, twice_waits) = counts
        told = self.told_waits(lambda: [step() for _ in range(steps)])
        return {
            "launches": (twice - launches) / steps,
            "waits": (twice_waits - waits) / steps,
            "waits_told": told / steps,
        }

    def told_waits(self, call: Callable[[], object]) -> int:
        """How often PyTorch itself says that a call of its own waits for the device."""
        if not self.cuda:
            call()
            return 0
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing CUDA operation" in str(one.message) for one in told)

    def captured(self, call: Callable[[], object]) -> Callable[[], object]:
        """``call`` as a CUDA graph's replay; nothing runs while it is captured. On a CPU the call itself."""
        if not self.cuda:
            return call
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay


def _copy(source: torch.Tensor, target: torch.Tensor) -> Contender:
    return Contender(lambda: target.copy_(source, non_blocking=True))
