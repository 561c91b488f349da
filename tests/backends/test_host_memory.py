from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ml
from backends.host_memory import ALIGNMENT, HUGE_PAGE, aligned
from tests.rigs.memory import may_be_huge


def test_host_memory_is_aligned_and_can_be_written_to_its_end() -> None:
    for nbytes in (1, 1000, HUGE_PAGE - 1, HUGE_PAGE, 3 * HUGE_PAGE + 5):
        memory = aligned(nbytes, np.zeros)
        assert memory.nbytes == nbytes
        assert memory.__array_interface__["data"][0] % ALIGNMENT == 0
        assert not memory.any()
        memory[...] = 7
        assert (memory == 7).all()


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no transparent huge pages here"
)
@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_large_tensors_of_the_host_may_be_in_huge_pages(name: str) -> None:
    if name == "torch":
        pytest.importorskip("torch")
    with ml.open_backend(name, device="cpu") as backend:
        ctx = backend.new_context()
        for made in (ctx.zeros((3, HUGE_PAGE), ml.DType.U8), ctx.empty((HUGE_PAGE,), ml.DType.BF16)):
            place = made.native
            address = place.data_ptr() if name == "torch" else place.__array_interface__["data"][0]
            assert may_be_huge(address)
