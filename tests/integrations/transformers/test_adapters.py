"""HFPrefixCache on models with adapters of PEFT, against ``generate`` without any sharing."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
import torch

from kvcache import NotSupportedError
from kvcache.integrations.transformers import HFPrefixCache, TransformersModel
from kvcache.stores import MemoryStore, compose
from kvcache_engine.engine import Engine, EngineOptions
from kvcache_engine.errors import RequestError
from kvcache_engine.requests import GenerationOptions

from ...rigs import hf_models as hf
from ...rigs.hf_models import OPTIONS, llama, plain

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of what PEFT asks


def lora(**options: Any) -> Any:
    given = {"r": 4, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(**given, init_lora_weights=False, **options)


def adapted(*names: str) -> Any:
    """A model with adapters of these names, of which the first is active."""
    made = peft.get_peft_model(llama(2), lora(), adapter_name=names[0]).eval()
    for name in names[1:]:
        made.add_adapter(name, lora())
    return made


def test_prefixes_are_found_for_the_adapters_that_computed_them() -> None:
    made, ids = adapted("one", "two"), hf.tokens(1, 14)
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


def test_what_was_computed_before_adapters_were_merged_or_taken_out_again_is_not_found() -> None:
    """What else has changed the weights between the two cannot be told from it."""
    made, ids = adapted("one", "two"), hf.tokens(1, 14)
    keys = made.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    with HFPrefixCache(made, max_sequences=2, capacity=64) as prefix:
        changes: list[Callable[[], Any]] = [
            lambda: made.set_adapter("one"),
            lambda: (keys.data.mul_(-1), made.merge_adapter(["two"])),
            lambda: (keys.data.mul_(-2), made.unmerge_adapter()),
            lambda: made.set_adapter("two"),
        ]
        for change in changes:
            change()
            for reused in (0, 13):
                before = prefix.stats.reused
                assert torch.equal(prefix.generate(ids, **OPTIONS), plain(made, ids))
                assert prefix.stats.reused - before == reused


def test_no_order_of_changes_to_adapters_finds_what_they_did_not_compute() -> None:
    made, ids = adapted("one", "two"), hf.tokens(1, 14)
    keys = made.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    changes: dict[str, Callable[[], Any]] = {
        "one": lambda: made.set_adapter("one"),
        "two": lambda: made.set_adapter("two"),
        "merge": made.merge_adapter,
        "unmerge": made.unmerge_adapter,
        "train": lambda: trained(made, Path()),
        "scale": lambda: rescaled(made, Path()),
        "base": lambda: keys.data.mul_(-1),
    }
    random = Random(0)
    with HFPrefixCache(made, max_sequences=2, capacity=64) as prefix:
        for _ in range(24):
            for name in random.sample([*changes], random.choice((1, 2))):
                changes[name]()
            off = random.random() < 0.3
            with made.disable_adapter() if off else contextlib.nullcontext():
                expected = plain(made, ids)
                for _ in range(2):
                    assert torch.equal(prefix.generate(ids, **OPTIONS), expected)
        assert prefix.stats.reused


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
        ("ADAPTION_PROMPT", "do not expose whether they are disabled"),
        ("LILY", "weighs its experts by all tokens of a pass"),
        ("SHADOW", "keys and values are not cached"),
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


def replaced(made: Any, folder: Path) -> None:
    """Another adapter under the name."""
    other = adapted("one")
    trained(other, folder)
    other.save_pretrained(folder)
    made.delete_adapter("one")
    made.load_adapter(folder / "one", "one")
    made.set_adapter("one")


def tensors(made: Any) -> list[torch.Tensor]:
    return [tensor for name, tensor in made.named_parameters() if "lora_A.one" in name]


def rescaled(made: Any, folder: Path) -> None:
    for layer in made.modules():
        if hasattr(layer, "set_scale"):
            layer.set_scale("one", 0.25)


@torch.no_grad()
def trained(made: Any, folder: Path) -> None:
    tensors(made)[0].add_(0.5)


@torch.no_grad()
def one_element(made: Any, folder: Path) -> None:
    tensors(made)[0][1, 7] += 3


def written(made: Any, folder: Path) -> None:
    """As weights are synchronized: no version counts it."""
    for tensor in tensors(made):
        tensor.data.mul_(-1)


def assigned(made: Any, folder: Path) -> None:
    tensors(made)[0].data = torch.randn_like(tensors(made)[0])


@torch.no_grad()
def base(made: Any, folder: Path) -> None:
    made.get_input_embeddings().weight.add_(0.5)


def base_written(made: Any, folder: Path) -> None:
    made.get_input_embeddings().weight.data.mul_(0.5)


def fused(made: Any, folder: Path) -> None:
    made.merge_and_unload()


def none(made: Any, folder: Path) -> None:
    made.delete_adapter("two")


CHANGES = {
    "another under its name": replaced, "its scale": rescaled, "a training step": trained,
    "one element": one_element, "through .data": written, "new .data": assigned, "the model's own": base,
    "the model's own through .data": base_written, "merged for good": fused, "an adapter at rest": none,
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_have_changed_find_nothing_that_they_did_not_compute(
    change: str, tmp_path: Path
) -> None:
    made, ids = adapted("one", "two"), hf.tokens(1, 14)
    with HFPrefixCache(made, max_sequences=2, capacity=64) as prefix:
        assert torch.equal(prefix.generate(ids, **OPTIONS), plain(made, ids))
        with made.disable_adapter():
            assert torch.equal(prefix.generate(ids, **OPTIONS), plain(made, ids))
        assert prefix.stats.reused == 0
        CHANGES[change](made, tmp_path)
        computing = made if change != "merged for good" else made.base_model.model
        for reused in (13 * (change == "an adapter at rest"), 13):
            before = prefix.stats.reused
            assert torch.equal(prefix.generate(ids, **OPTIONS), plain(computing, ids))
            assert prefix.stats.reused - before == reused


ORDERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "column-major": lambda weight: weight.t().contiguous().t(),
    "part of a larger one": lambda weight: torch.cat((weight, weight), 1)[:, : weight.shape[1]],
    "every other row": lambda weight: weight.repeat_interleave(2, 0)[::2],
}


@pytest.mark.parametrize("order", ORDERS)
def test_weights_in_another_order_are_watched_where_they_lie(order: str) -> None:
    made = llama(2)
    weight = made.model.layers[0].mlp.up_proj.weight
    weight.data = ORDERS[order](weight.data)
    model = TransformersModel(made)
    assert model.variant() == model.variant() is None
    weight.data.mul_(-1)
    assert model.variant() is not None


def exchanged(made: Any, folder: Path) -> None:
    one, other = (layer.self_attn for layer in made.model.layers)
    one.k_proj, other.k_proj = other.k_proj, one.k_proj


def another_module(made: Any, folder: Path) -> None:
    attention = made.model.layers[1].self_attn
    attention.k_proj = copy.deepcopy(attention.k_proj)


def another_tensor(made: Any, folder: Path) -> None:
    made.model.norm.weight = torch.nn.Parameter(made.model.norm.weight * 2)


def new_data(made: Any, folder: Path) -> None:
    made.model.norm.weight.data = made.model.norm.weight.data * 2


@pytest.mark.parametrize(
    "change",
    [base, base_written, exchanged, another_module, another_tensor, new_data],
    ids=lambda one: one.__name__,
)
def test_a_model_without_adapters_has_another_variant_after_each_change_only(
    change: Callable[[Any, Path], None], tmp_path: Path
) -> None:
    made = llama(2)
    model = TransformersModel(made)
    assert model.variant() == model.variant() is None
    change(made, tmp_path)
    assert model.variant() == model.variant() is not None


def test_weights_of_one_content_in_their_first_row_are_told_apart() -> None:
    """97 rows of 32: a sixteenth of all elements is a multiple of the rows."""
    made = llama(2)
    weight = made.model.embed_tokens.weight
    for order in ORDERS:
        weight.data = ORDERS[order](weight.data)
        model = TransformersModel(made)
        other = weight.data + 1
        other[0], other[:, 0] = weight.data[0], weight.data[:, 0]
        weight.data.copy_(other)
        assert model.variant() is not None, order


NAMES = {"numbers of layers": ("0", "1"), "a part of the model": ("mlp", "model"), "weights": ("weight", "h")}


@pytest.mark.parametrize("names", NAMES)
def test_adapters_may_have_the_names_of_parts_of_the_model(names: str) -> None:
    first, second = NAMES[names]
    made, ids = adapted(first, second), hf.tokens(1, 14)
    layer = made.base_model.model.model.layers[0]
    changes: list[Callable[[], Any]] = [
        lambda: made.set_adapter(second),
        lambda: layer.self_attn.v_proj.lora_A[second].weight.data.mul_(-3),
        lambda: layer.self_attn.k_proj.weight.data.mul_(-3),
        lambda: layer.mlp.up_proj.weight.data.mul_(-9),
    ]
    with HFPrefixCache(made, max_sequences=2, capacity=64) as prefix:
        for change in changes:
            for reused in (0, 13):
                before = prefix.stats.reused
                assert torch.equal(prefix.generate(ids, **OPTIONS), plain(made, ids))
                assert prefix.stats.reused - before == reused
            change()


def test_adapters_in_a_part_of_the_model_are_noticed() -> None:
    made, ids = llama(2), hf.tokens(1, 14)
    peft.inject_adapter_in_model(lora(), made.model, adapter_name="one")
    layers = [part for part in made.modules() if hasattr(part, "lora_A")]
    changes: list[Callable[[Any], Any]] = [
        lambda layer: layer.scale_layer(0.25), lambda layer: layer.enable_adapters(False),
    ]  # fmt: skip
    with HFPrefixCache(made, max_sequences=2, capacity=64) as prefix:
        for change in (lambda layer: None, *changes):
            for layer in layers:
                change(layer)
            for reused in (0, 13):
                before = prefix.stats.reused
                assert torch.equal(prefix.generate(ids, **OPTIONS), plain(made, ids))
                assert prefix.stats.reused - before == reused


def test_the_memory_of_adapters_that_were_deleted_is_freed() -> None:
    made = adapted("one", "two")
    made.set_adapter("two")
    model = TransformersModel(made.base_model.model)
    tensors_of_two = [tensor for name, tensor in made.named_parameters() if ".two." in name]
    kept = weakref.ref(tensors_of_two[0].untyped_storage())
    assert model.variant() is not None
    made.set_adapter("one")
    made.delete_adapter("two")
    del tensors_of_two
    assert model.variant() is not None
    gc.collect()
    assert kept() is None


class Wrapper(torch.Tensor):
    """A weight that wraps another tensor, as quantized ones do, and gives no access to its memory."""

    _inner: torch.Tensor

    @staticmethod
    def of(inner: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(Wrapper, inner.shape, dtype=inner.dtype)
        made._inner = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_inner"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls.of(arguments[0]._inner)
        if function in (torch.ops.aten.permute.default, torch.ops.aten.view.default):
            raise NotImplementedError(function)
        values = [one._inner if isinstance(one, Wrapper) else one for one in arguments]
        return function(*values, **(named or {}))


def test_weights_that_wrap_others_are_watched_inside() -> None:
    made, ids = llama(2), hf.tokens(1, 14)
    projection = made.model.layers[0].self_attn.k_proj
    projection.weight = torch.nn.Parameter(Wrapper.of(projection.weight.detach().clone()), False)
    with HFPrefixCache(made, max_sequences=2, capacity=64) as prefix:
        for reused in (0, 13):
            assert torch.equal(prefix.generate(ids, **OPTIONS), plain(made, ids))
            assert prefix.stats.reused == reused
        projection.weight._inner.mul_(-1)
        assert torch.equal(prefix.generate(ids, **OPTIONS), plain(made, ids))
        assert prefix.stats.reused == 13


def test_sparse_weights_are_watched_by_their_versions() -> None:
    made, ids = llama(2), hf.tokens(1, 14)
    projection = made.model.layers[0].mlp.up_proj
    projection.weight = torch.nn.Parameter(projection.weight.detach().to_sparse_csr(), False)
    with HFPrefixCache(made, max_sequences=2, capacity=64) as prefix:
        for reused in (0, 13):
            assert torch.equal(prefix.generate(ids, **OPTIONS), plain(made, ids))
            assert prefix.stats.reused == reused
        weight = projection.weight.detach()
        projection.weight = torch.nn.Parameter(-weight, False)
        assert torch.equal(prefix.generate(ids, **OPTIONS), plain(made, ids))
        assert prefix.stats.reused == 13


def test_adapters_that_come_and_go_leave_the_variant_of_the_model_as_it_was() -> None:
    made = llama(2)
    model = TransformersModel(made)
    wrapped = peft.get_peft_model(made, lora())
    assert model.variant() is not None
    with wrapped.disable_adapter():
        assert model.variant() is None
    wrapped.unload()
    assert model.variant() is None


def test_an_adapter_is_found_again_by_what_it_is_in_another_process_too(tmp_path: Path) -> None:
    made, ids = adapted("one"), hf.tokens(1, 14)
    store = MemoryStore()
    trained(made, tmp_path)
    made.save_pretrained(tmp_path)
    options: dict[str, Any] = {"capacity": 64, "tiers": [store], "identity": {"model": "m"}, "block_size": 4}
    with HFPrefixCache(made, **options) as prefix:
        prefix.generate(ids, salt="a", shared=9, **OPTIONS)
    made = adapted("new")
    made.load_adapter(tmp_path / "one", "again")
    with HFPrefixCache(made, **options) as prefix:
        for name, salt, reused in (("new", "a", 0), ("again", "a", 12), ("again", "b", 9)):
            made.set_adapter(name)
            before = prefix.stats.reused
            assert torch.equal(prefix.generate(ids, salt=salt, shared=9, **OPTIONS), plain(made, ids))
            assert prefix.stats.reused - before == reused, name


def test_a_salt_imitates_no_adapter() -> None:
    made, ids = adapted("one"), hf.tokens(1, 14)
    with HFPrefixCache(made, max_sequences=2, capacity=64) as prefix:
        prefix.generate(ids, **OPTIONS)
        variant = prefix.adapters.variant()
        name = compose(variant)
        with made.disable_adapter():
            for salt in (repr(("", variant)), name.decode("latin-1"), name.hex(), str(variant)):
                assert torch.equal(prefix.generate(ids, salt=salt, **OPTIONS), plain(made, ids))
        assert prefix.stats.reused == 0


def test_what_two_adapters_have_computed_together_is_kept_for_none() -> None:
    made, ids = adapted("one", "two"), hf.tokens(1, 14)
    with HFPrefixCache(made, max_sequences=2, capacity=64) as prefix:
        with prefix.begin(ids[0].tolist()) as session:
            made.set_adapter("two")
            session.prefill()
        for name in ("one", "two"):
            made.set_adapter(name)
            assert torch.equal(prefix.generate(ids, **OPTIONS), plain(made, ids))
        assert prefix.stats.reused == 0


def test_an_engine_finds_prefixes_for_the_adapters_that_computed_them() -> None:
    """They change while it is idle; under requests they may not, and what these leave is kept for none."""
    made, ids = adapted("one", "two"), hf.tokens(1, 14)
    settings, found = GenerationOptions(8, ignore_eos=True), []
    with Engine(TransformersModel(made.base_model.model), None, EngineOptions(capacity=64)) as engine:
        for adapter in ("one", "two", "one", "two"):
            made.set_adapter(adapter)
            (answer,) = engine.complete([ids[0].tolist()], settings)
            assert [*answer.tokens] == plain(made, ids)[0, 14:].tolist()
            found.append(answer.reused)
        assert found == [0, 0, 13, 13]
        other = [5, *ids[0].tolist()]
        engine.submit(other, settings)
        engine.step()
        made.set_adapter("one")
        with pytest.raises(RequestError, match="have changed, while earlier requests are unfinished"):
            engine.submit(ids[0].tolist(), settings)
        while engine.busy:
            engine.step()
        for adapter in ("two", "one"):
            made.set_adapter(adapter)
            assert engine.complete([other], settings)[0].reused == 0
