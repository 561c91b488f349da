"""How far each operation is off on each backend: the table of docs/backends.md.

``python -m benchmarks.accuracy [BACKEND ...]`` writes those columns. F32 against float64, over numbers of
many magnitudes, where the result is finite and not denormal.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import ml
from benchmarks.pages import DOCS, fill, load, save, table
from ml.testing.compute import BINARY, UNARY, gelu
from ml.testing.special import FUNCTIONS, RELATIVE

RECORD, PAGE = "benchmarks/accuracy.json", "backends.md"
UNIT = 2.0**-24
"""Half of a last place of F32, relative: what rounding once costs."""
SMALL = 4.0
"""Units up to which an error is not worth a row of the page."""
COUNT = 1 << 16
ELEMENTWISE = {
    **{f"a.{op}(ctx)": numpy for op, numpy in UNARY.items() if op not in ("neg", "abs", "relu", "round")},
    "a.gelu(ctx)": "gelu(a)", "a.gelu(ctx, 'tanh')": "gelu(a, True)",
    **{f"a.{op}(ctx, b)": BINARY[op] for op in ("add", "sub", "mul", "div")},
}  # fmt: skip
ROWS: dict[str, str] = {
    "a.softmax(ctx)": "np.exp(a) / np.exp(a).sum(-1, keepdims=True)",
    "a.sum(ctx, -1)": "a.sum(-1)",
    "a.mean(ctx, -1)": "a.mean(-1)",
    "a.rms_norm(ctx, None, 1e-6)": "a / np.sqrt((a * a).mean(-1, keepdims=True) + 1e-6)",
    "a.matmul(ctx, b)": "a @ b",
}
"""Of 64 rows of 1,024 numbers about 1: below 0 too but for sums and products, where they would cancel out."""


def measured(backend: ml.Backend) -> dict[str, float]:
    """The largest error of each operation, in units of ``UNIT`` of the result."""
    random = np.random.default_rng(7)
    wide = random.choice([-1, 1], COUNT) * 2.0 ** random.uniform(-20, 20, COUNT)
    near = np.concatenate([wide[: COUNT // 2], random.uniform(-100, 100, COUNT // 2)])
    rows = random.normal(size=(64, 1024))
    found = {}
    with backend.new_context() as ctx:
        for call, expression in ELEMENTWISE.items():
            found[call] = _error(ctx, call, expression, near, random.permutation(wide))
        for call, expression in ROWS.items():
            signed = "softmax" in call or "rms" in call
            found[call] = _error(ctx, call, expression, rows if signed else np.abs(rows), np.abs(rows.T))
    return found


def _error(ctx: ml.Context, call: str, expression: str, *operands: np.ndarray) -> float:
    given = [x.astype(np.float32) for x in operands]
    tensors = dict(zip("ab", map(ctx.from_numpy, given), strict=False))
    actual = eval(call, {"ctx": ctx, **tensors}).to_numpy().astype(np.float64)
    with np.errstate(all="ignore"):
        operands_in_full = dict(zip("ab", (x.astype(np.float64) for x in given), strict=False))
        right = eval(expression, {"np": np, "gelu": gelu, **operands_in_full})
        normal = (np.abs(right) < float(np.finfo(np.float32).max)) & (np.abs(right) > 1e-37)
        # Where a function crosses 0, against what the suite allows there.
        least = FUNCTIONS.get(call, ("", 0.0))[1] / RELATIVE[ml.DType.F32]
        return float((np.abs(actual - right) / np.maximum(np.abs(right), least))[normal].max() / UNIT)


def main() -> None:
    record = load(DOCS / RECORD)
    for name in sys.argv[1:] or ["numpy", "torch", "mlx"]:
        with ml.open_backend(name, device="cpu") as backend:
            version = next(one.version for one in ml.available_backends() if one.name == name)
            record[name] = {"version": version, "errors": measured(backend)}
    save(DOCS / RECORD, record)
    fill(DOCS / PAGE, {"accuracy": shown(record)})


def shown(record: dict[str, Any]) -> str:
    """Of the operations that are further off than ``SMALL`` on one of the backends."""
    rows = []
    for call in (*ELEMENTWISE, *ROWS):
        if max(one["errors"][call] for one in record.values()) <= SMALL:
            continue
        short = call.removeprefix("a.").replace("ctx, ", "").replace("ctx", "")
        rows.append([f"`{short}`", *(f"{one['errors'][call]:.1f}" for one in record.values())])
    return table(["operation", *(f"{name} {one['version']}" for name, one in record.items())], rows)


if __name__ == "__main__":
    main()
