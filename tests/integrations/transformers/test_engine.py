"""The engine over transformers' models: everything that it does gives what the model gives alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("torch")

import torch
import transformers

import ml
from kvcache import NotSupportedError
from kvcache.integrations.transformers import TransformersModel, attention
from kvcache_engine import Engine, EngineOptions, GenerationOptions, SpeculativeOptions
from kvcache_engine.drafts import ModelDraft

from ...rigs import hf_models as hf


def llama(**changes: Any) -> Any:
    return copy.deepcopy(hf.model("llama", **changes))


def alone(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    ids = [*prompt]
    for _ in range(count):
        ids.append(int(hf.feed(model, None, torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def ids(count: int, seed: int = 0) -> list[int]:
    found: list[int] = hf.tokens(1, count, seed)[0].tolist()
    return found


def test_a_model_that_drafts_for_itself_is_right() -> None:
    model = TransformersModel(llama())
    settings = GenerationOptions(12, ignore_eos=True)
    with (
        Engine(model, None, SpeculativeOptions(capacity=64)) as engine,
        ModelDraft(model, capacity=64) as draft,
    ):
        engine.draft = draft
        answers = engine.complete([ids(9), ids(5, 1)], settings)
        assert [[*answer.tokens] for answer in answers] == [
            alone(model.model, ids(9), 12), alone(model.model, ids(5, 1), 12)
        ]  # fmt: skip
        assert engine.speculation.acceptance == 1.0


def test_trying_a_model_says_nothing_of_who_attends(caplog: pytest.LogCaptureFixture) -> None:
    model = llama()
    TransformersModel(model)
    attention._say.cache_clear()
    TransformersModel(model)  # which attends by the interface already
    assert "own attention" not in caplog.text


def test_a_model_goes_on_to_work_by_itself() -> None:
    made = llama()
    before = hf.generate(made, hf.inputs("llama", 2))
    model = TransformersModel(made)
    with Engine(model, None, EngineOptions(capacity=64)) as engine:
        engine.complete([ids(9)], GenerationOptions(3))
        assert hf.generate(made, hf.inputs("llama", 2)).distance(before) < 1e-4


def test_a_model_can_be_trained_after_the_engine_has_driven_it() -> None:
    """Passes run in inference mode; nothing that they leave in a model may be of that mode."""
    model = llama().requires_grad_(True)
    with Engine(TransformersModel(model), options=EngineOptions(capacity=64)) as engine:
        engine.complete([ids(9)], GenerationOptions(3))
    batch = torch.tensor([ids(8)])
    model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())
    assert not any(one.is_inference() for one in (*model.parameters(), *model.buffers()))


def refused(made: Any, reason: str) -> None:
    before = getattr(made.config.get_text_config(decoder=True), "_attn_implementation", None)
    with pytest.raises(NotSupportedError, match=reason):
        TransformersModel(made)
    assert getattr(made.config.get_text_config(decoder=True), "_attn_implementation", None) == before


def test_a_loaded_model_keeps_its_weights_in_the_order_that_is_read_faster(tmp_path: Path) -> None:
    made = llama(tie_word_embeddings=True)
    made.save_pretrained(tmp_path)
    with ml.open_backend("torch") as backend:
        loaded = TransformersModel.load(tmp_path, backend, ml.DType.F32).model
        narrow = TransformersModel.load(tmp_path, backend, ml.DType.BF16).model
    head, mlp = loaded.lm_head.weight, loaded.model.layers[0].mlp
    assert head.shape[0] > head.shape[1]
    assert head is loaded.get_input_embeddings().weight
    if torch.backends.mkl.is_available():
        assert [x.t().is_contiguous() for x in (head, mlp.up_proj.weight, mlp.down_proj.weight)] == [1, 1, 0]
        assert len({weight.untyped_storage().data_ptr() for weight in loaded.parameters()}) == 1  # huge pages
    assert all(weight.is_contiguous() for weight in narrow.parameters())
    for name, weight in made.named_parameters():
        assert torch.equal(weight, loaded.get_parameter(name))
    prompt = torch.tensor([ids(9)])
    torch.testing.assert_close(loaded(prompt).logits, made(prompt).logits, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_a_model_loaded_in_inference_mode_can_be_trained_outside(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    with ml.open_backend("torch") as backend:
        loaded = TransformersModel.load(tmp_path, backend, ml.DType.F32).model
    assert not any(weight.is_inference() for weight in loaded.parameters())


def test_what_cannot_be_driven_is_refused_in_a_sentence() -> None:
    refused(hf.model("t5"), "T5ForConditionalGeneration has an encoder")
    refused(hf.model("minimax"), "accepts caches of a class of its own only")
    refused(llama().train(), "training mode")
    refused(llama().double(), "computes in torch.float64")

    class Counts(transformers.LlamaForCausalLM):  # type: ignore[misc]
        """Logits depend on how many tokens a call has."""

        def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
            out = super().forward(input_ids=input_ids, **options)
            out.logits = out.logits + input_ids.shape[1] * torch.arange(97)
            return out

    refused(Counts(llama().config).eval(), "cannot be driven.*logits are .* of the largest")
