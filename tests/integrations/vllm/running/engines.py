"""vLLM's engine in this process, with a store behind it or none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

BLOCK = 32
"""The fewest tokens that the CPU's attention has in a block."""


def _why_no_fp8() -> str:
    try:
        _get_attn_isa(torch.float32, BLOCK, BLOCK, "fp8")
    except NotImplementedError as error:
        return f"vLLM: {error}"
    return ""


NEEDS_FP8 = pytest.mark.skipif(bool(_why_no_fp8()), reason=_why_no_fp8())


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    cached: int
    """Tokens of the prompt that were not computed."""
    reason: str | None = None


@dataclass
class Engine:
    llm: Any

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int = 12, salts: Sequence[str | None] | None = None
    ) -> list[Answer]:
        given = [
            {"prompt_token_ids": [*prompt], **({"cache_salt": salt} if salt else {})}
            for prompt, salt in zip(prompts, salts or [None] * len(prompts), strict=True)
        ]
        outputs = self.llm.generate(given, sampling(count), use_tqdm=False)
        return [answer(output) for output in outputs]

    def tokens(self, prompts: Sequence[Sequence[int]], count: int = 12) -> list[list[int]]:
        return tokens_of(self.generate(prompts, count))

    def keep(
        self, prompts: Sequence[Sequence[int]], count: int = 12, salts: Sequence[str | None] | None = None
    ) -> list[Answer]:
        """As ``generate``; what was computed is in the stores then, and nowhere else."""
        found = self.generate(prompts, count, salts)
        self.written()
        self.forget()
        return found

    def forget(self) -> None:
        """What vLLM itself has cached, and nothing of the store's."""
        assert self.llm.reset_prefix_cache()

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def connector(self) -> Any:
        return self.core.scheduler.connector

    def written(self) -> None:
        """Wait until what was computed is in the stores."""
        worker()._worker._stores.tier.writes.flush()

    def keys(self, tokens: Sequence[int], count: int) -> list[str]:
        """Of the pages of a prompt that nothing is salted with."""
        plain = dict.fromkeys(("cache_salt", "lora_request", "prompt_embeds"))
        bare = SimpleNamespace(all_token_ids=tokens, mm_features=(), **plain)
        return list(self.connector._planner._pages.keys(bare, count)[0])

    def counts(self) -> dict[str, float]:
        """What has been counted since the start, of both sides."""
        return {
            metric.name.removeprefix("vllm:kvcache_"): metric.value
            for metric in self.llm.get_metrics()
            if metric.name.startswith("vllm:kvcache_")
        }


def tokens_of(answers: Sequence[Answer]) -> list[list[int]]:
    return [one.tokens for one in answers]


def worker() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()


def sampling(count: int) -> Any:
    return SamplingParams(temperature=0, max_tokens=count, detokenize=False, ignore_eos=True)


def answer(output: Any) -> Answer:
    found = output.outputs[0]
    return Answer([*found.token_ids], output.num_cached_tokens or 0, found.finish_reason)


def transfer(store: str | list[str], policy: str = "recompute", role: str = "kv_both", **extra: Any) -> Any:
    return KVTransferConfig(
        kv_connector="KVCacheConnector", kv_connector_module_path="kvcache.integrations.vllm", kv_role=role,
        kv_load_failure_policy=policy, kv_connector_extra_config={"store": store, "page_tokens": 64, **extra},
    )  # fmt: skip


def beside_rejecting(store: str, first: bool, **extra: Any) -> Any:
    """Our connector in vLLM's MultiConnector, and one whose loads fail; ``extra`` is the latter's."""
    both = [
        {"kv_connector": "Rejecting", "kv_connector_module_path": "tests.integrations.vllm.running.rejecting",
         "kv_role": "kv_both", "kv_connector_extra_config": extra},
        {"kv_connector": "KVCacheConnector", "kv_connector_module_path": "kvcache.integrations.vllm",
         "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
         "kv_connector_extra_config": {"store": store, "page_tokens": 64}},
    ]  # fmt: skip
    return KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_load_failure_policy="recompute",
        kv_connector_extra_config={"connectors": both[::-1] if first else both},
    )  # fmt: skip


@contextlib.contextmanager
def engine(model: Path, store: Any = None, **options: Any) -> Iterator[Engine]:
    """``store``: a URL, what ``transfer`` gave, or None for vLLM alone."""
    given = {
        "dtype": "float32", "max_model_len": 1024, "block_size": BLOCK, "enforce_eager": True,
        "skip_tokenizer_init": True, "disable_log_stats": False, **options,
    }  # fmt: skip
    config = transfer(store) if isinstance(store, str) else store
    llm = None
    try:
        llm = LLM(model=str(model), kv_transfer_config=config, **given)
        yield Engine(llm)
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        ensure_kv_transfer_shutdown()  # one that failed as it was made has left its connector
        cleanup_dist_env_and_memory()
