"""What XLA compiles in one run of the tests is there in the next, as kernels of numba are."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..conftest import QUICK_TO_COMPILE

__all__ = ["kept_programs"]

KEPT = Path(__file__).parent / "__pycache__" / "jax"


@contextlib.contextmanager
def kept_programs(folder: Path) -> Iterator[None]:
    """Processes that start in the block compile quickly, and only what no run has compiled before.

    A program is found by all that it says: where a backend says something else, that is compiled. They
    work on a copy in ``folder``, since JAX writes in place, and a process that is killed leaves a half.
    """
    KEPT.mkdir(parents=True, exist_ok=True)
    programs = shutil.copytree(KEPT, folder / "programs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", QUICK_TO_COMPILE)
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(programs))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        patch.setenv("JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES", "none")  # they are found by the folder's name
        yield
    with tempfile.TemporaryDirectory(dir=KEPT.parent) as whole:
        for path in programs.iterdir():
            if not (KEPT / path.name).exists():
                Path(shutil.copy(path, whole)).replace(KEPT / path.name)
