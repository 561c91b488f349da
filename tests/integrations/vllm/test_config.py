"""What is asked of the connector and of vLLM: options, versions, what models are named by, and refusals."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ml
from kvcache import InvalidRangeError, NotSupportedError
from kvcache.integrations.vllm import versions
from kvcache.integrations.vllm.counters import COUNTED, Counters
from kvcache.integrations.vllm.identity import check_config, identity_of_config, settings_of
from kvcache.integrations.vllm.naming import Pages
from kvcache.integrations.vllm.options import ConnectorOptions
from kvcache.integrations.vllm.sides import SchedulerSide
from kvcache.integrations.vllm.steps import Report
from kvcache.stores import UnknownModelError, identity_of

SETTINGS = {"kind": "CausalCache", "dtype": "F32"}


def space(**fields: Any) -> Any:
    return SimpleNamespace(**fields)


# Options.


def test_options_as_they_are_given() -> None:
    found = ConnectorOptions.parse({"store": "memory:", "host_memory": "2MiB", "page_tokens": 64})
    assert (found.store, found.host_memory, found.page_tokens) == (("memory:",), 2 << 20, 64)
    assert ConnectorOptions.parse({"store": ["memory:", "file:///x"]}).store == ("memory:", "file:///x")
    assert ConnectorOptions.parse({"store": "memory:"}).identity is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "store=None"),
        ({"store": ""}, "store=''"),
        ({"store": []}, "store=[]"),
        ({"store": ["memory:", 3]}, "store="),
        ({"store": "memory:", "storage": 1}, "'storage' is not an option"),
        ({"store": "memory:", "page_tokens": -1}, "page_tokens=-1"),
        ({"store": "memory:", "page_tokens": 16.0}, "page_tokens=16.0"),
        ({"store": "memory:", "load_threads": 0}, "load_threads=0"),
        ({"store": "memory:", "load_threads": True}, "load_threads=True"),
        ({"store": "memory:", "lookup_wait": -0.1}, "lookup_wait=-0.1"),
        ({"store": "memory:", "lookup_timeout": "1s"}, "lookup_timeout='1s'"),
        ({"store": "memory:", "host_memory": "lots"}, "host_memory='lots'"),
        ({"store": "memory:", "save_generated": 1}, "save_generated=1"),
        ({"store": "memory:", "pages": "tokens"}, "pages='tokens'"),
        ({"store": "memory:", "identity": {}}, "identity={}"),
        ({"store": "memory:", "identity": "llama"}, "identity='llama'"),
    ],
    ids=str,
)
def test_options_that_are_none(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRangeError, match=re.escape(said)):
        ConnectorOptions.parse(given)


def test_pages_are_whole_blocks() -> None:
    options = ConnectorOptions.parse({"store": "memory:"})
    assert [options.tokens_of_page(size) for size in (16, 128, 96, 544)] == [128, 128, 192, 544]
    with pytest.raises(InvalidRangeError, match="page_tokens=48; vLLM's blocks have 32"):
        ConnectorOptions.parse({"store": "memory:", "page_tokens": 48}).tokens_of_page(32)


# Versions.


def test_versions() -> None:
    versions.check_version("0.32.0")
    versions.check_version("1.0.0rc1+cpu")
    with pytest.raises(NotSupportedError, match=re.escape("vLLM 0.31.2; at least 0.32 is needed")):
        versions.check_version("0.31.2")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_import_says_what_to_install() -> None:
    import kvcache.integrations.vllm as package

    with pytest.raises(ImportError, match=re.escape("pip install 'vllm>=0.32'")):
        package.KVCacheConnector  # noqa: B018
    with pytest.raises(AttributeError):
        package.Other  # noqa: B018
    assert not any(name.startswith("vllm") for name in sys.modules)


# Names.


def request(**fields: Any) -> Any:
    given = {"all_token_ids": [*range(20)], "cache_salt": None, "lora_request": None, "mm_features": ()}
    return space(**{**given, "prompt_embeds": None, "request_id": "r", **fields})


def image(offset: int, name: str) -> Any:
    return space(mm_position=space(offset=offset, length=3), identifier=name)


def adapter(folder: Path, data: bytes = b"weights") -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(data)
    return adapter_at(folder)


def adapter_at(folder: Path) -> Any:
    number = sum(map(ord, folder.name))
    return space(lora_path=str(folder), lora_name="any", lora_int_id=number, load_inplace=False)


def test_pages_are_named_anew_by_their_size_and_by_a_reset(tmp_path: Path) -> None:
    pages, late = Pages({"model": "m"}, SETTINGS, 8), request(mm_features=[image(9, "x")])
    before = pages.keys(request(), 20)[0]
    assert pages.keys(late, 20)[0][0] == before[0], "an image changes nothing that comes before it"
    assert Pages({"model": "m"}, SETTINGS, 16).keys(request(), 20)[0][0] not in before
    assert len({keys[0] for keys in Pages({"model": "m"}, SETTINGS, 8, 4).keys(request(), 20)}) == 4
    pages.reset()
    assert not {*before} & {*pages.keys(request(), 20)[0]}


def test_keys_that_are_asked_for_bit_by_bit_are_those_of_the_whole(tmp_path: Path) -> None:
    pages = Pages({"model": "m"}, SETTINGS, 4, 2)
    images = [image(0, "x"), image(9, "y"), image(9, "z")]
    given = request(cache_salt="a", lora_request=adapter(tmp_path / "one"), mm_features=images)
    own = pages.of(given)
    for tokens in (3, 4, 4, 9, 20, 8):
        assert own.upto(tokens) == pages.keys(given, tokens)


def test_requests_that_no_key_names_are_refused(tmp_path: Path) -> None:
    pages = Pages({"model": "m"}, SETTINGS, 8)
    for no, fields in (
        ("LoRA adapter '.*' are not in a folder", {"lora_request": adapter_at(tmp_path / "no")}),
        ("embeddings", {"prompt_embeds": object()}),
    ):
        with pytest.raises(NotSupportedError, match=no):
            pages.of(request(**fields))


def test_an_adapter_is_named_by_the_files_that_were_loaded(tmp_path: Path) -> None:
    """It is trained again in its folder, and vLLM goes on with the weights that it has."""
    pages, folder = Pages({"model": "m"}, SETTINGS, 8), tmp_path / "one"
    given = request(lora_request=adapter(folder))
    own, before = pages.of(given), pages.keys(given, 8)[0]
    (folder / "README.md").write_text("what it was trained on")
    assert pages.keys(given, 8)[0] == before
    adapter(folder, b"longer weights")
    assert own.upto(16)[0][:1] == before
    with pytest.raises(NotSupportedError, match="have changed since it was first used"):
        pages.of(given)
    for again in ({"lora_int_id": 2}, {"load_inplace": True}):
        anew = request(lora_request=space(**{**vars(given.lora_request), **again}))
        assert pages.keys(anew, 8)[0] != before
    shutil.rmtree(folder)
    assert own.upto(16)[0][:1] == before
    with pytest.raises(NotSupportedError, match="have changed"):
        pages.of(given)


# vLLM's configuration.


class FullAttentionSpec:
    sliding_window = attention_chunk_size = None


class SlidingWindowSpec(FullAttentionSpec):
    pass


class MLAAttentionSpec(FullAttentionSpec):
    pass


class MambaSpec:
    pass


class UniformTypeKVCacheSpecs:
    def __init__(self, *specs: Any) -> None:
        self.kv_cache_specs = {str(number): spec for number, spec in enumerate(specs)}


def config(model: Path | str = "m", **fields: Any) -> Any:
    given: dict[str, Any] = {
        "model": str(model), "revision": None, "dtype": "torch.float32", "quantization": None,
        "hf_overrides": {}, "max_model_len": 100, "hf_config_path": None, "quantization_config": None,
        "multimodal_config": None, "hf_config": space(architectures=["LlamaForCausalLM"]),
        "hf_text_config": space(rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    }  # fmt: skip
    return space(
        model_config=space(**{**given, **{name: fields[name] for name in fields.keys() & given.keys()}}),
        load_config=space(
            load_format=fields.get("load_format", "auto"), model_loader_extra_config=fields.get("loader", {})
        ),
        parallel_config=space(
            pipeline_parallel_size=fields.get("pipeline", 1),
            tensor_parallel_size=fields.get("tensor", 1),
            decode_context_parallel_size=fields.get("context", 1),
        ),
        speculative_config=fields.get("speculative"),
        cache_config=space(cache_dtype="auto", calculate_kv_scales=fields.get("scales", False)),
    )


def groups(*specs: Any) -> Any:
    return space(kv_cache_groups=[space(kv_cache_spec=spec) for spec in specs])


@pytest.mark.parametrize(
    ("fields", "specs", "said"),
    [
        ({"pipeline": 2}, [FullAttentionSpec()], "pipeline parallelism is not supported"),
        ({"context": 2}, [FullAttentionSpec()], "context parallelism"),
        ({"scales": True}, [FullAttentionSpec()], "scales"),
        ({"speculative": space(method="eagle3")}, [FullAttentionSpec()], "'eagle3'"),
        ({}, [FullAttentionSpec(), SlidingWindowSpec()], "2 groups of KV cache layers"),
        ({}, [FullAttentionSpec(), MambaSpec()], "MambaSpec"),
        ({}, [SlidingWindowSpec()], "a KV cache of SlidingWindowSpec"),
        ({}, [MLAAttentionSpec()], "a KV cache of MLAAttentionSpec"),
        ({}, [UniformTypeKVCacheSpecs(FullAttentionSpec(), MLAAttentionSpec())], "MLAAttentionSpec"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",  # the same in every worker
)
def test_what_is_not_served_is_said_at_the_start(fields: dict[str, Any], specs: list[Any], said: str) -> None:
    with pytest.raises(NotSupportedError, match=re.escape(said)):
        check_config(config(**fields), groups(*specs))


def test_what_is_served() -> None:
    check_config(config(), groups(FullAttentionSpec()))
    check_config(config(speculative=space(method="ngram")), groups(FullAttentionSpec()))
    check_config(config(tensor=4), groups(UniformTypeKVCacheSpecs(FullAttentionSpec(), FullAttentionSpec())))


def identify(given: Any, **options: Any) -> dict[str, Any]:
    return identity_of_config(given, ConnectorOptions.parse({"store": "memory:", **options}))


def test_models_are_named_as_our_runner_names_them(make_model: Callable[..., Path]) -> None:
    folder = make_model()
    assert identify(config(folder)) == identity_of(folder, ml.DType.F32)
    assert identify(config(folder, dtype="torch.bfloat16"))["dtype"] == "BF16"
    assert identify(config(folder), identity={"model": "mine"}) == {"model": "mine"}


def test_what_is_changed_as_the_model_is_loaded_is_named_too(make_model: Callable[..., Path]) -> None:
    folder, quantized = make_model(), space(architectures=["X"], quantization_config={"bits": 4})
    assert identify(config(folder, quantization="fp8"))["vllm"] == {"quantization": "fp8"}
    assert "vllm" not in identify(config(folder, quantization="awq", hf_config=quantized))
    overrides = {"rope_parameters": {"rope_theta": 1.0}}
    assert identify(config(folder, hf_overrides=overrides))["vllm"] == {"hf_overrides": overrides}
    for fields in (
        {"quantization_config": {"linear": "fp8_per_block"}},
        {"loader": {"qlora_adapter_name_or_path": "x"}},
        {"multimodal_config": space(mm_processor_kwargs={"max_pixels": 9}, media_io_kwargs={})},
        {"hf_config_path": "elsewhere", "hf_config": space(to_json_string=lambda: '{"rope_theta": 1.0}')},
    ):
        assert identify(config(folder, **fields)) != identify(config(folder)), fields
    threads = {"enable_multithread_load": True, "num_threads": 8}
    assert "vllm" not in identify(config(folder, loader=threads))
    texts = [f'{{"rope_theta": 1.0, "transformers_version": "5.{minor}"}}' for minor in range(2)]
    configs = [space(to_json_string=lambda text=text: text) for text in texts]
    one, other = (identify(config(folder, hf_config_path="x", hf_config=given)) for given in configs)
    assert one == other
    dynamic = space(rope_parameters={"full": {"rope_type": "dynamic"}, "other": {"rope_type": "default"}})
    assert identify(config(folder, hf_text_config=dynamic))["vllm"] == {"max_model_len": 100}
    with pytest.raises(UnknownModelError, match="hf_overrides is a function"):
        identify(config(folder, hf_overrides=lambda one: one))


def test_weights_that_nothing_tells_have_to_be_named(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for given in (config("nobody/nothing"), config(make_model(), load_format="dummy")):
        with pytest.raises(UnknownModelError, match='"identity"'):
            identify(given)
        assert identify(given, identity={"model": "mine"}) == {"model": "mine"}


def test_pages_are_shared_where_every_cache_would_hold_the_same() -> None:
    raw = {"kind": "vLLM blocks", "layout": "x"}
    assert settings_of(config(), SETTINGS, [None]) == SETTINGS
    assert settings_of(config(), SETTINGS, [None, 64])["windows"] == [None, 64]
    for given in (
        config(hf_config=space(architectures=["GemmaForCausalLM"])),
        config(tensor=2),
        config(hf_text_config=space(rope_parameters={"rope_type": "yarn"})),
    ):
        assert settings_of(given, SETTINGS, [None])["computed_by"] == "vLLM"
    assert settings_of(config(), raw, [None])["computed_by"] == "vLLM"


def test_ranks_whose_pages_differ_are_refused() -> None:
    options = ConnectorOptions.parse({"store": "memory:", "page_tokens": 8})
    side = SchedulerSide(options, {"model": "m"}, 4)
    try:
        with pytest.raises(NotSupportedError, match="must be equal"):
            side.begin({0: "{}", 1: '{"a": 1}'}, True, True)
        with pytest.raises(NotSupportedError, match="must be equal"):
            side.begin({1: "{}"}, True, True)
        planner, limit = side.begin({0: json.dumps(SETTINGS)}, True, True), time.monotonic() + 30
        while (found := planner.match(request(), 0)) == (None, False) and time.monotonic() < limit:
            time.sleep(0.001)  # the store has not answered yet
        assert found == (0, False)
    finally:
        side.close()


def test_counts_are_taken_once_and_all_have_a_word() -> None:
    counters = Counters()
    counters.add("lookups")
    counters.add("lookups", 2)
    assert counters.take() == {"lookups": 3}
    assert counters.take() == {}
    used = set()
    for file in Path(versions.__file__).parent.glob("*.py"):
        used |= set(re.findall(r'[cC]ounters\.add\(\s*"(\w+)"', file.read_text(encoding="utf-8")))
        used |= {"pages_refused", "pages_stored"}
    assert used == COUNTED.keys()


def test_reports_of_two_ranks() -> None:
    one, other = Report({"a"}, {"b"}, set(), {"r"}), Report({"c"}, set(), {"d"}, {"s"})
    joined = one.joined(other)
    assert joined == other.joined(one) == Report({"a", "c"}, {"b"}, {"d"}, {"r", "s"})
    assert joined
    assert not Report()
