"""Stores against plain reading, writing and copying of the same bytes: ``python -m benchmarks.stores``."""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from kvcache.bench.timing import Contender, Sample, Trial, machine
from kvcache.stores import FileStore, Keys, MemoryStore, SerializedSnapshot, pack

__all__ = ["main"]

MIB = 1 << 20
LAYERS = 32
PART = 128 << 10
"""Bytes of a page of 512 tokens that lie in a run: one head of 128 in a 16-bit dtype."""


def page(nbytes: int) -> list[memoryview]:
    """K and V of 32 layers, bfloat16, as a page's parts."""
    random = np.random.default_rng(0)
    shape = (nbytes // (2 * LAYERS * 1024 * 2), 8, 128)
    halves = random.integers(0, 2**16, shape, np.uint16)
    arrays = {
        f"{name}.{i}": (halves + i).view(ml_dtypes.bfloat16) for i in range(LAYERS) for name in ("k", "v")
    }
    return pack(SerializedSnapshot({"layers": LAYERS}, arrays))


def reading(folder: Path, parts: Sequence[memoryview]) -> dict[str, Contender]:
    """Into a buffer that was touched before, from files that lie in the system's page cache."""
    size = sum(len(part) for part in parts)
    buffer = np.zeros(size, np.uint8)
    store = FileStore(folder / "read", durable=False)
    store.put("a", parts)
    path = folder / "read" / "pages" / "a.safetensors"

    def plain() -> None:
        with open(path, "rb", buffering=0) as file:
            view, done = memoryview(buffer), 0
            while done < size:
                done += file.readinto(view[done:])

    def read_in_parts() -> None:
        reader = store.reader("a")
        assert reader is not None
        reader.fill([buffer[start : start + PART] for start in range(0, size, PART)])

    return {
        "plain readinto": Contender(plain),
        "FileStore.get_into": Contender(lambda: store.get_into("a", buffer)),
        "FileStore.reader": Contender(read_in_parts),
    }


def writing(folder: Path, parts: Sequence[memoryview], durable: bool) -> dict[str, Contender]:
    """Into a new file."""
    store = FileStore(folder / f"write-{durable}", durable=durable)
    path = folder / "plain"

    def plain() -> None:
        with open(path, "wb", buffering=0) as file:
            for part in parts:
                done = 0
                while done < len(part):
                    done += file.write(part[done:])
            if durable:
                os.fsync(file.fileno())

    def remove() -> None:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()

    name = "plain write and fsync" if durable else "plain write"
    return {
        name: Contender(plain, remove),
        f"FileStore.put, durable={durable}": Contender(
            lambda: store.put("a", parts), lambda: store.delete("a")
        ),
    }


def remembering(parts: Sequence[memoryview]) -> dict[str, Contender]:
    """From one piece of host memory into another."""
    size = sum(len(part) for part in parts)
    buffer, source = np.zeros(size, np.uint8), np.concatenate([np.frombuffer(p, np.uint8) for p in parts])
    store = MemoryStore()
    store.put("a", parts)
    return {
        "memcpy": Contender(lambda: np.copyto(buffer, source)),
        "MemoryStore.get_into": Contender(lambda: store.get_into("a", buffer)),
    }


def looking_up(folder: Path) -> dict[str, Contender]:
    """The keys of 100,000 tokens: hashed, and found in the folder."""
    tokens = list(range(100_000))
    keys = Keys({"model": "m"})
    chain = keys.chain(tokens).aligned
    store = FileStore(folder / "keys", durable=False)
    for key in chain:
        store.put(key, [b"x"])
    return {
        "Keys.chain of 100,000 tokens": Contender(lambda: keys.chain(tokens).aligned),
        f"FileStore.stat of {len(chain)} keys": Contender(lambda: store.stat(chain)),
        f"FileStore.prefix of {len(chain)} keys": Contender(lambda: store.prefix(chain)),
    }


def interleave(contenders: dict[str, Contender], rounds: int) -> dict[str, Sample]:
    """Every round runs each once. All rounds count: those of a tenth of a second are always interrupted."""
    order = list(contenders.items())
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(rounds + 2):
        turn = i % len(order)
        for name, contender in order[turn:] + order[:turn]:
            contender.prepare()
            start = time.perf_counter()
            contender.call()
            if i >= 2:
                times[name].append((time.perf_counter() - start) * 1e6)
    return Trial(times, floor=order[0][0]).samples()


def table(title: str, samples: dict[str, Sample], ratios: bool = True) -> list[str]:
    lines = ["", f"## {title}", "", "| | milliseconds | x first row |", "|---|---|---|"]
    for name, sample in samples.items():
        figures = [f"{value / 1000:,.2f}" for value in (sample.median, sample.low, sample.high)]
        ratio = f"{sample.ratio:.2f}" if ratios else ""
        lines.append(f"| {name} | {figures[0]} [{figures[1]}, {figures[2]}] | {ratio} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 128, 256], help="sizes of entries")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--folder", type=Path, help="on the file system to be measured; default: the system's"
    )
    options = parser.parse_args()
    print("# Stores\n")
    print("Median [10th, 90th percentile] of interleaved rounds; the ratio is the median of the rounds' own.")
    print(f"\n{machine()}; {options.rounds} rounds.")
    for mib in options.mib:
        parts = page(mib * MIB)
        parts_of: list[tuple[str, Callable[[Path], dict[str, Contender]]]] = [
            ("read", lambda folder, parts=parts: reading(folder, parts)),
            ("written", lambda folder, parts=parts: writing(folder, parts, False)),
            ("written to the device", lambda folder, parts=parts: writing(folder, parts, True)),
            ("copied in memory", lambda folder, parts=parts: remembering(parts)),
        ]
        for title, make in parts_of:
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                samples = interleave(make(Path(folder)), options.rounds)
            print("\n".join(table(f"{mib} MiB {title}", samples)))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        print("\n".join(table("Keys", interleave(looking_up(Path(folder)), options.rounds), ratios=False)))


if __name__ == "__main__":
    main()
