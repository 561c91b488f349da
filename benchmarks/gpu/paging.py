"""Stage g: pages to host memory and back beside memcpy, and what decoding loses while a page leaves."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

import ml
from benchmarks.gpu.record import Stage
from benchmarks.gpu.tables import Steps
from benchmarks.page_out import DIM, HEADS, LAYERS, Leaving
from kvcache.testing.bench import Contender

DTYPE = ml.DType.BF16


def pages(stage: Stage) -> None:
    """A conversation of four layers leaves, and comes back: bytes per second beside those of memcpy."""
    device = stage.device
    for tokens in (256,) if stage.quick else (2048, 32768):
        nbytes = 2 * LAYERS * tokens * HEADS * DIM * DTYPE.itemsize
        floors = device.copies(nbytes)
        with device.open() as backend:
            left, back = (Leaving(backend, tokens, DTYPE, 1 << 40) for _ in range(2))

            def away(back: Leaving = back) -> None:
                back.fill()
                back.wait()

            times = device.compare(
                {
                    "out": Contender(left.wait, left.fill, left.done),
                    "in": Contender(back.back, away, back.done),
                },
                rounds=7,
            )
        rates = {way: nbytes / found["wall_us"] * 1e6 for way, found in times.items()}
        stage.note(
            f"{tokens} tokens", {"bytes": nbytes, "bytes_per_s": rates, "memcpy": floors, "times": times}
        )
    for way, copy in (("out", "pinned, to host"), ("in", "pinned, to device")):
        stage.goal(
            f"page-{way} of {tokens} tokens, as a share of pinned memcpy",
            rates[way] / floors[copy],
            0.9,
            False,
        )


def beside_decoding(stage: Stage) -> None:
    """Microseconds of a decode step alone, and while a page leaves beside it."""
    device = stage.device
    tokens, sequences, each = (256, 2, 32) if stage.quick else (32768, 8, 1024)
    with device.open() as backend:
        steps, page = Steps(backend, sequences, each), Leaving(backend, tokens, DTYPE, 1 << 40)

        def decoded(seconds: float) -> list[float]:
            """As many steps as fit, four at the least, each up to its end."""
            found: list[float] = []
            ends = time.perf_counter() + seconds
            while len(found) < 4 or time.perf_counter() < ends:
                steps.room()
                began = time.perf_counter()
                steps.first()
                device.synchronize()
                found.append((time.perf_counter() - began) * 1e6)
            return found

        for _ in range(2):  # the first one makes room in host memory
            page.fill()
            began = time.perf_counter()
            page.wait()
            alone_s = time.perf_counter() - began
            page.done()
        decoded(0.0)
        alone, beside = decoded(alone_s), []
        for _ in range(1 if stage.quick else 5):
            page.fill()
            device.synchronize()
            page.page_out()
            beside += decoded(alone_s)
            page.done()
    found: dict[str, Any] = {"page_out_ms": alone_s * 1e3, "steps_beside": len(beside)}
    for name, times in (("alone", alone), ("beside", beside)):
        found[name] = {"median_us": statistics.median(times), "worst_us": max(times)}
    found["times_alone"] = found["beside"]["median_us"] / found["alone"]["median_us"]
    stage.note("a decode step", found)


STEPS = {step.__name__.replace("_", " "): torch.no_grad()(step) for step in (pages, beside_decoding)}
