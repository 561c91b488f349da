"""``--runtime``: models of transformers and mlx-lm behind generate, chat and serve, with what is theirs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")
pytest.importorskip("torch")

import torch
import transformers

import kvcache_engine.runtimes as runtimes
from kvcache.stores import identity_of
from kvcache_engine import ModelError, Tokenizer, bundled_model
from kvcache_engine.runtimes import Runtime, runtime_for, sampling_defaults

from .cli_rig import run

PROMPT, OTHER = "In the beginning", "And God said"
TEMPLATE = "{% for message in messages %}[{{ message.role }}] {{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random StableLM, which we have no model for, with the tokenizer of the bundled model."""
    return saved(tmp_path_factory.mktemp("stablelm"), "stablelm")


def saved(folder: Path, kind: str, **changes: Any) -> Path:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(3)
    shape = {
        "vocab_size": Tokenizer.load(bundled_model()).vocab_size, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1,
        "max_position_embeddings": 256, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(kind, **shape, **changes)
    transformers.AutoModelForCausalLM.from_config(config).eval().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_model() / name, folder / name)
    return folder


def edit(folder: Path, copy: Path, name: str, **fields: Any) -> Path:
    """A copy of the folder with other fields in one of its files of JSON; None: without that field."""
    shutil.copytree(folder, copy)
    told = {**json.loads((copy / name).read_text(encoding="utf-8")), **fields}
    text = json.dumps({field: value for field, value in told.items() if value is not None})
    (copy / name).write_text(text, encoding="utf-8")
    return copy


def generated(folder: Path, *arguments: object, prompts: tuple[str, ...] = (PROMPT,)) -> list[dict[str, Any]]:
    asked = [word for prompt in prompts for word in ("--prompt", prompt)]
    result = run("generate", "--model", folder, *asked, "--max-tokens", 6, "--json", *arguments)
    assert result.exit_code == 0, result.stderr
    found: list[dict[str, Any]] = json.loads(result.stdout)["outputs"]
    return found


def own_words(folder: Path, text: str, count: int) -> list[int]:
    """What transformers' own ``generate`` says."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([Tokenizer.load(folder).encode(text)])
    said = model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=-1)
    return said[0, ids.shape[1] :].tolist()


def test_generate_says_what_the_model_says_in_transformers(folder: Path, tmp_path: Path) -> None:
    """Several at once; its own ends of texts, and of texts that share a prefix each token once."""
    prompts = (PROMPT, OTHER, f"{PROMPT} {OTHER}")
    expected = [own_words(folder, prompt, 6) for prompt in prompts]
    found = generated(folder, prompts=prompts)
    assert [answer["tokens"] for answer in found] == expected
    ended = edit(folder, tmp_path / "ended", "generation_config.json", eos_token_id=[2, expected[0][2]])
    [answer] = generated(ended)
    assert (answer["reason"], answer["tokens"]) == ("stop", expected[0][:2])
    [again] = generated(folder, "--draft", folder)  # which drafts for itself
    assert again["tokens"] == expected[0]


def test_a_model_of_mlx_lm_is_asked_where_it_is_to_be(tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm")
    folder = saved(tmp_path / "llama", "llama", tie_word_embeddings=False)
    [own], [theirs], [mlx] = (
        generated(folder, *given) for given in ((), ("--runtime", "transformers"), ("--runtime", "mlx-lm"))
    )
    assert own["tokens"] == theirs["tokens"] == mlx["tokens"] == own_words(folder, PROMPT, 6)


def test_chat_goes_on_where_a_turn_ended(folder: Path) -> None:
    result = run("chat", "--model", folder, "--json", "--max-tokens", 4, text=f"{PROMPT}\n{OTHER}\n")
    assert result.exit_code == 0, result.stderr
    first, second = (json.loads(line) for line in result.stdout.splitlines()[:2])
    assert second["prompt_tokens"] > first["prompt_tokens"]
    assert second["reused"] >= first["prompt_tokens"]


def test_a_saved_conversation_goes_on_with_the_model_and_runtime_that_it_is_of(
    folder: Path, tmp_path: Path
) -> None:
    path, expected = tmp_path / "said.kv", own_words(folder, PROMPT, 6)
    first = run("save", "--model", folder, "--prompt", PROMPT, "--max-tokens", 3, "--out", path, "--json")
    assert first.exit_code == 0, first.stderr
    again = run("load", path, "--model", folder, "--max-tokens", 3, "--json")
    assert again.exit_code == 0, again.stderr
    told = [json.loads(result.stdout) for result in (first, again)]
    assert [token for one in told for token in one["outputs"][0]["tokens"]] == expected
    assert told[1]["statistics"]["computed_tokens"] == 1
    other = run("load", path)
    assert other.exit_code == 1
    assert "is of a model that runs in transformers, and" in other.stderr
    assert "use --runtime transformers, and the original --model" in other.stderr


LONG = 20
"""More than a page of both texts in turn."""
RUNTIMES = ("own", "transformers", "mlx-lm")


def chatted(store: Path, runtime: str, *texts: str, folder: Path | None = None) -> list[dict[str, Any]]:
    """The turns of a chat in this store."""
    model = () if folder is None else ("--model", folder)
    arguments = ("--runtime", runtime, "--store", store, "--json", "--max-tokens", 4)
    result = run("chat", *model, *arguments, text="".join(f"{text}\n" for text in texts))
    assert result.exit_code == 0, result.stderr
    return [one for one in map(json.loads, result.stdout.splitlines()) if "prompt_tokens" in one]


@pytest.mark.parametrize("first", RUNTIMES)
def test_runtimes_that_compute_the_same_share_stores_and_files(first: str, tmp_path: Path) -> None:
    """The bundled model: each goes on with what another has computed, and the prefix caches find it, too."""
    pytest.importorskip("mlx_lm")
    import mlx_lm

    from kvcache.integrations.mlx_lm import MLXPrefixCache
    from kvcache.integrations.transformers import HFPrefixCache

    path, whole = tmp_path / "said.kv", generated(bundled_model(), prompts=(PROMPT,))[0]["tokens"]
    made = ("save", "--prompt", PROMPT, "--max-tokens", 3, "--out", path, "--runtime", first)
    assert run(*made).exit_code == 0
    text = " ".join([PROMPT, OTHER] * LONG)
    [begun] = chatted(tmp_path / "kept", first, text)
    for runtime in RUNTIMES:
        again = run("load", path, "--runtime", runtime, "--max-tokens", 3, "--json")
        assert again.exit_code == 0, again.stderr
        told = json.loads(again.stdout)
        assert told["outputs"][0]["tokens"] == whole[3:]
        assert told["statistics"]["computed_tokens"] == 1
        copied = shutil.copytree(tmp_path / "kept", tmp_path / runtime)
        [turn] = chatted(copied, runtime, OTHER)
        assert turn["reused"] >= begun["prompt_tokens"] > 128
    options = {"tiers": [tmp_path / "kept"], "identity": identity_of(bundled_model(), "F32")}
    tokens = [*Tokenizer.load(bundled_model()).encode(text), 7]
    torch_model = transformers.AutoModelForCausalLM.from_pretrained(bundled_model(), dtype=torch.float32)
    mlx_model, _ = mlx_lm.utils.load_model(bundled_model())
    mlx_model.set_dtype(mlx_lm.utils.mx.float32)
    for prefix in (HFPrefixCache(torch_model, **options), MLXPrefixCache(mlx_model, **options)):
        with prefix, prefix.begin(tokens) as session:
            assert session.cached >= 128


def test_runtimes_that_compute_otherwise_share_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """mlx-lm reads no ``rope_parameters`` of a Llama, and would rotate its keys with another base."""
    pytest.importorskip("mlx_lm")
    rope = {"rope_type": "default", "rope_theta": 500.0}
    folder = saved(tmp_path / "llama", "llama", tie_word_embeddings=False, rope_parameters=rope)
    path, text = tmp_path / "said.kv", " ".join([PROMPT, OTHER] * LONG)
    by_itself = chatted(tmp_path / "alone", "mlx-lm", text, folder=folder)
    for runtime in ("own", "transformers"):
        chatted(tmp_path / "kept", runtime, text, folder=folder)
    caplog.clear()
    assert chatted(tmp_path / "kept", "mlx-lm", text, folder=folder) == by_itself
    [line] = [one.getMessage() for one in caplog.records if "only between" in one.getMessage()]
    assert "only between processes with mlx-lm: mlx-lm rotates keys by {'rope_theta': 10000.0" in line
    arguments = ("--model", folder, "--runtime")
    assert run("save", "--prompt", PROMPT, "--out", path, *arguments, "transformers").exit_code == 0
    assert run("load", path, *arguments, "own").exit_code == 0
    refused = run("load", path, *arguments, "mlx-lm")
    assert (refused.exit_code, "is of a model that runs in own" in refused.stderr) == (1, True)


def test_the_cache_of_a_run_is_drawn(folder: Path) -> None:
    result = run("inspect", "--model", folder, "--prompt", PROMPT, "--max-tokens", 2, "--text")
    assert result.exit_code == 0, result.stderr
    assert "beginning" in result.stdout


def test_the_models_own_sampling_holds_where_nothing_else_is_said(folder: Path, tmp_path: Path) -> None:
    drawn = edit(
        folder, tmp_path / "drawn", "generation_config.json", do_sample=True, temperature=5.0, top_k=None
    )
    assert sampling_defaults(folder) == {}
    assert sampling_defaults(drawn) == {"temperature": 5.0}
    [greedy], [sampled], [colder] = (
        generated(*given) for given in ((folder,), (drawn, "--seed", 1), (drawn, "--temperature", 0))
    )
    assert greedy["tokens"] == colder["tokens"] != sampled["tokens"]


def test_which_runtime_a_folder_is_for(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized = edit(folder, tmp_path / "quantized", "config.json", quantization={"bits": 4})
    nothing = edit(folder, tmp_path / "nothing", "config.json", model_type=None, architectures=None)
    here = set(Runtime)
    monkeypatch.setattr(Runtime, "installed", property(lambda runtime: runtime in here))
    monkeypatch.setattr(runtimes.sys, "platform", "linux")
    assert runtime_for(bundled_model()) is Runtime.OWN
    assert runtime_for(folder) is Runtime.TRANSFORMERS
    assert runtime_for(quantized) is Runtime.MLX_LM
    monkeypatch.setattr(runtimes.sys, "platform", "darwin")
    assert runtime_for(folder) is Runtime.MLX_LM
    assert runtime_for(bundled_model(), Runtime.TRANSFORMERS) is Runtime.TRANSFORMERS
    with pytest.raises(ModelError, match="unsupported architecture"):
        runtime_for(nothing)
    here = {Runtime.OWN}
    with pytest.raises(ModelError, match=r"StableLmForCausalLM.*run with pip install 'ml-kvcache\[transf"):
        runtime_for(folder)
    with pytest.raises(Exception, match=r"--runtime mlx-lm needs mlx-lm: pip install 'ml-kvcache\[mlx-lm\]'"):
        runtime_for(folder, Runtime.MLX_LM)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--backend", "cupy"), "--backend cupy: transformers runs on torch"),
        (("--devices", "cpu,cpu"), "--devices cpu,cpu requires --runtime own"),
        (("--tensor-parallel", 2), "--tensor-parallel requires --runtime own"),
        (("--draft", "mtp"), "--draft mtp requires --runtime own"),
        (("--runtime", "own"), "unsupported architecture StableLmForCausalLM"),
    ],
)
def test_what_is_for_our_own_models_is_refused(folder: Path, arguments: tuple[Any, ...], told: str) -> None:
    result = run("generate", "--model", folder, "--prompt", PROMPT, *arguments)
    assert result.exit_code == 1
    assert told in result.stderr


def test_what_a_library_cannot_load_is_told_in_a_line(folder: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(folder, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"nothing")
    result = run("generate", "--model", broken, "--prompt", PROMPT)
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
    assert f"{broken}: transformers cannot load this model" in result.stderr


def test_serve_answers_with_the_model_of_transformers(folder: Path) -> None:
    """Two clients one after another: the second reuses what the first one's prompt computed."""
    pytest.importorskip("starlette")
    from ..serve.test_process import command

    with command("--model", folder, "--runtime", "transformers") as (_, client):
        asked = {"model": "it", "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
        answers = [client.completions.create(**asked) for _ in range(2)]
    expected = Tokenizer.load(folder).decode(own_words(folder, PROMPT, 6))
    assert [answer.choices[0].text for answer in answers] == [expected] * 2
    assert answers[1].usage.prompt_tokens_details.cached_tokens > 0
