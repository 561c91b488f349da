"""vLLM itself, on the CPU, with our connector: ``make test-vllm``. Without vLLM nothing is collected."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

HERE = importlib.util.find_spec("vllm") is not None
collect_ignore_glob = [] if HERE else ["test_*.py"]

if HERE:  # before anything imports it
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    for name, value in settings.items():
        os.environ.setdefault(name, value)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from .models import write_model

    return write_model(tmp_path_factory.mktemp("llama"), "llama")
