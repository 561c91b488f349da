"""HFPrefixCache on models with adapters of PEFT, against ``generate`` without any sharing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
import torch

from kvcache import NotSupportedError
from kvcache.integrations.transformers import HFPrefixCache

from . import hf_models as hf

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of what PEFT asks
OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


def plain(made: Any, ids: torch.Tensor) -> torch.Tensor:
    return made.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **OPTIONS)


def llama(layers: int, **changes: Any) -> Any:
    """One that nobody else has: it may be changed."""
    return hf.model.__wrapped__("llama", num_hidden_layers=layers, **changes)


def lora(**options: Any) -> Any:
    given = {"r": 4, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(**given, init_lora_weights=False, **options)


def test_prefixes_are_found_for_the_adapters_that_computed_them() -> None:
    made, ids = peft.get_peft_model(llama(2), lora(), adapter_name="one").eval(), hf.tokens(1, 14)
    made.add_adapter("two", lora())
    with HFPrefixCache(made, max_sequences=2, capacity=64) as prefix:
        for adapter, reused in [("one", 0), ("two", 0), (None, 0), ("one", 13), ("two", 13), (None, 13)]:
            made.set_adapter(adapter or "one")
            with contextlib.nullcontext() if adapter else made.disable_adapter():
                before, expected = prefix.stats.reused, plain(made, ids)
                assert torch.equal(prefix.generate(ids, shared=5, **OPTIONS), expected)
                assert prefix.stats.reused - before == reused, adapter
        made.base_model.model.model.layers[0].self_attn.v_proj.scale_layer(3.0)
        assert torch.equal(prefix.generate(ids, **OPTIONS), plain(made, ids))
        with pytest.raises(NotSupportedError, match=r"adapter_names is given.*set_adapter"):
            prefix.generate(ids, adapter_names=["two"], **OPTIONS)
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    with (
        HFPrefixCache(peft.get_peft_model(llama(2), prompts), max_sequences=2, capacity=64) as prefix,
        pytest.raises(NotSupportedError, match="PROMPT_TUNING puts virtual tokens before the prompt"),
    ):
        prefix.generate(ids, **OPTIONS)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("drafter", ["assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens"])
def test_drafts_start_from_a_prefix_of_a_model_that_peft_wraps(drafter: str, mixed: bool) -> None:
    made = peft.get_peft_model(llama(2), lora(), mixed=mixed).eval()
    drafts = {drafter: llama(1) if drafter == "assistant_model" else 1}
    ids = torch.cat((hf.tokens(1, 14), hf.tokens(1, 14)[:, :6]), 1)
    with HFPrefixCache(made, max_sequences=2, capacity=64) as prefix:
        found = prefix.generate(ids, **drafts, **OPTIONS)
        assert torch.equal(found, plain(made, ids))
        later = torch.cat((found, hf.tokens(1, 3)), 1)
        assert torch.equal(prefix.generate(later, **OPTIONS), plain(made, later))
        assert prefix.stats.reused == 27


def test_prefixes_are_found_for_the_adapters_that_are_merged() -> None:
    made, ids = peft.get_peft_model(llama(2), lora(), adapter_name="one").eval(), hf.tokens(1, 14)
    made.add_adapter("two", lora())
    with HFPrefixCache(made, max_sequences=2, capacity=64) as prefix:
        changes: list[tuple[Callable[[], Any], int]] = [
            (lambda: made.set_adapter("one"), 0),
            (lambda: made.merge_adapter(["two"]), 0),
            (made.unmerge_adapter, 13),
            (lambda: made.set_adapter("two"), 13),
        ]
        for change, reused in changes:
            change()
            before = prefix.stats.reused
            assert torch.equal(prefix.generate(ids, **OPTIONS), plain(made, ids))
            assert prefix.stats.reused - before == reused


def tuned(kind: str, folder: Path) -> Any:
    """A model with adapters whose keys and values cannot be shared."""
    shape, task = {"num_key_value_heads": 4, "head_dim": 8}, "CAUSAL_LM"
    if kind == "XLORA":
        peft.get_peft_model(llama(2, **shape), lora()).save_pretrained(folder)
    configs: dict[str, Callable[[], Any]] = {
        "LORA": lambda: lora(alora_invocation_tokens=[90, 91]),
        "ADAPTION_PROMPT": lambda: peft.AdaptionPromptConfig(task_type=task, adapter_layers=2, adapter_len=4),
        "LILY": lambda: peft.LilyConfig(task_type=task, target_modules=["q_proj"]),
        "SHADOW": lambda: peft.ShadowConfig(task_type=task),
        "XLORA": lambda: peft.XLoraConfig(task_type=task, hidden_size=32, adapters={"0": str(folder)}),
    }
    base = llama(2, use_cache=kind != "XLORA", **shape)
    return peft.get_peft_model(base, configs[kind]()).eval()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("LORA", "starts at the last invocation"),
        ("ADAPTION_PROMPT", "do not tell whether they are disabled"),
        ("LILY", "weighs its experts by all tokens of a pass"),
        ("SHADOW", "keys and values are in no cache"),
        ("XLORA", "evaluates each pass twice"),
    ],
)
def test_adapters_that_no_prefix_can_be_shared_with_are_refused(kind: str, why: str, tmp_path: Path) -> None:
    made, ids = tuned(kind, tmp_path), hf.tokens(1, 14)
    with HFPrefixCache(made, max_sequences=2, capacity=64) as prefix:
        with pytest.raises(NotSupportedError, match=f"begin: {kind} .*{why}.*; call the model without"):
            prefix.generate(ids, **OPTIONS)
        if kind in ("LORA", "LILY"):
            with made.disable_adapter():
                assert torch.equal(prefix.generate(ids, **OPTIONS), plain(made, ids))
