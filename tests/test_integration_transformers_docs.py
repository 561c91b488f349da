"""docs/embedding-transformers.md works as written: its blocks run, in order, in one session."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("torch")

import torch

PAGE = Path(__file__).resolve().parents[1] / "docs" / "embedding-transformers.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_page_runs_as_written() -> None:
    import torch._dynamo as dynamo

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    session: dict[str, Any] = {}
    try:
        blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
        assert blocks
        for number, block in enumerate(blocks):
            exec(compile(block, f"{PAGE.name}, block {number}", "exec"), session)
    finally:
        torch.set_num_threads(threads)
        dynamo.reset()
