"""Random traces of the caches that have a model of their own, by name."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Sequence

import ml
from ml import DType

FAMILY = {
    "recurrent": "kvcache.testing.rigs.states",
    "encoder": "kvcache.testing.rigs.encoder",
    "wrapper": "kvcache.testing.rigs.wrapper",
}
"""Name of a cache -> the module with its trace; imported when asked for."""


def run_family(
    cache: str, backend: ml.Backend, seed: int, floats: Sequence[DType], features: ml.Features
) -> str | None:
    """What went wrong in the trace of ``seed``, or None."""
    module, computes = importlib.import_module(FAMILY[cache]), features.has("matmul")
    try:
        if cache == "recurrent":
            module.state_trace(backend, seed, floats)
        elif cache == "encoder":
            module.encoder_trace(backend, seed, floats, computes)
        else:
            module.wrapper_trace(backend, seed)
    except Exception:
        return f"seed {seed}: {cache}\n{traceback.format_exc(limit=-6)}"
    return None
