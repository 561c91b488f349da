"""Reading safetensors and GGUF: every dtype and form, and one clear line for what is broken."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import kvcache
import ml
from kvcache_engine.checkpoints.gguf import half_split_rows
from kvcache_engine.checkpoints.gguf_vocab import merges_from_scores
from kvcache_engine.checkpoints.weights import open_weights
from kvcache_engine.errors import ModelError
from kvcache_engine.generate import Generator
from kvcache_engine.loading import bundled_model, check_weights, load_config, load_model
from kvcache_engine.requests import GenerationOptions
from kvcache_engine.tokenizer import Tokenizer
from kvcache_engine.weights import Loader

gguf = pytest.importorskip("gguf")
Make = Callable[..., Path]
QUERY = "model.layers.0.self_attn.q_proj.weight"


# safetensors


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_single_file_in_every_float(make_model: Make, dtype: Any) -> None:
    folder = make_model()
    written = {name: array.astype(dtype) for name, array in load_file(folder / "model.safetensors").items()}
    save_file(written, folder / "model.safetensors")
    source = open_weights(folder)
    assert set(source) == set(written)
    assert len(source) == len(written)
    assert source.nbytes == sum(array.nbytes for array in written.values())
    for name, array in written.items():
        assert source[name].dtype == dtype
        assert source.shape(name) == array.shape
        np.testing.assert_array_equal(source[name].astype(np.float32), array.astype(np.float32))


def shard(folder: Path) -> dict[str, Any]:
    """Cut a folder's weights into two files and an index; returns the index."""
    whole = folder / "model.safetensors"
    tensors = load_file(whole)
    names = sorted(tensors)
    index: dict[str, Any] = {"metadata": {}, "weight_map": {}}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-{i + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        index["weight_map"].update(dict.fromkeys(part, file))
    whole.unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return index


def test_shards_read_as_the_whole(make_model: Make) -> None:
    folder = make_model()
    whole = load_file(folder / "model.safetensors")
    shard(folder)
    source = open_weights(folder)
    assert set(source) == set(whole)
    assert source.nbytes == sum(array.nbytes for array in whole.values())
    for name, array in whole.items():
        np.testing.assert_array_equal(source[name], array)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("[]", "no valid index"),
        ('{"weight_map": 3}', "no valid index"),
        ('{"weight_map": {"a": "../elsewhere.safetensors"}}', "is not a file name"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "no such file"),
        ('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}', "no tensor 'a'"),
    ],
)
def test_a_broken_index(make_model: Make, broken: str, message: str) -> None:
    folder = make_model()
    shard(folder)
    (folder / "model.safetensors.index.json").write_text(broken, encoding="utf-8")
    with pytest.raises(ModelError, match=message):
        open_weights(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -1, -10_000])
def test_truncated_files_are_told_at_once(make_model: Make, keep: int) -> None:
    folder = make_model()
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:keep] if keep else b"")
    with pytest.raises(ModelError, match="truncated or not a safetensors file") as caught:
        open_weights(folder)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_weights_and_weights_of_another_kind(make_model: Make, tmp_path: Path) -> None:
    folder = make_model()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors and no model\.safetensors\.index\.json"):
        open_weights(folder)
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"pytorch_model\.bin.*convert it"):
        open_weights(folder)
    (folder / "model.gguf").touch()
    with pytest.raises(ModelError, match=r"model\.gguf: name that file"):
        open_weights(folder)
    with pytest.raises(ModelError, match="no such model folder"):
        open_weights(tmp_path / "nowhere")


def test_integer_weights_are_refused(make_model: Make) -> None:
    folder = make_model({QUERY: np.zeros((32, 32), np.int8)})
    with pytest.raises(ModelError, match="is I8; weights are read as F32, F16 and BF16"):
        open_weights(folder)[QUERY]


@pytest.mark.parametrize("dtype", [ml.DType.F32, ml.DType.BF16])
@pytest.mark.parametrize("shape", [(7, 3), (3, 7), (5, 5)])
def test_f32_maps_with_more_outputs_than_inputs_are_contiguous(
    backend: ml.Backend, shape: tuple[int, int], dtype: ml.DType
) -> None:
    stored = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    with backend.new_context() as ctx:
        made = Loader({"map.weight": stored}, {"map.weight": shape}, dtype).linear(ctx, "map").weight
        assert (made.strides == (shape[0], 1)) is (dtype is ml.DType.F32 and shape[0] > shape[1])
        np.testing.assert_array_equal(made.to_numpy().astype(np.float32), stored.T)


def test_missing_tensors_and_wrong_shapes_before_anything_is_on_a_device(
    make_model: Make, numpy_backend: ml.Backend
) -> None:
    folder = make_model({QUERY: np.zeros((32, 31), np.float32)})
    before = numpy_backend.memory().allocated
    with pytest.raises(ModelError, match=rf"{QUERY} has shape \(32, 31\); the config says \(32, 32\)"):
        load_model(folder, numpy_backend)
    tensors = load_file(folder / "model.safetensors")
    del tensors[QUERY], tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=rf"no tensor '{QUERY}' and 1 more"):
        load_model(folder, numpy_backend)
    with pytest.raises(ModelError, match="no tensor"):
        open_weights(folder)[QUERY]
    with pytest.raises(ModelError, match="no tensor"):
        open_weights(folder).shape(QUERY)
    assert numpy_backend.memory().allocated == before


# GGUF


def write_gguf(
    path: Path, folder: Path, arch: str, kind: Any = gguf.GGMLQuantizationType.F32, vocab: bool = False,
    by_layer: bool = False,
) -> None:  # fmt: skip
    """What llama.cpp's converter would make of a Hugging Face folder; ``by_layer``: heads as a list."""
    config = load_config(folder)
    layers = config.layers
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count([config.heads] * layers if by_layer else config.heads)
    writer.add_head_count_kv([config.kv_heads] * layers if by_layer else config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.base)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if vocab:
        add_vocab(writer, folder)
    source = open_weights(folder)
    for name, array in source.items():
        add_tensor(writer, ggml_name(name), permuted(name, array, config) if arch == "llama" else array, kind)
    write(writer)


def write(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def ggml_name(name: str) -> str:
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "model.layers.": "blk.", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    for theirs, ours in names.items():
        name = name.replace(theirs, ours)
    return name


def permuted(name: str, array: np.ndarray, config: Any) -> np.ndarray:
    """``LlamaModel.permute`` of convert_hf_to_gguf.py."""
    heads = {"q_proj": config.heads, "k_proj": config.kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return array
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def add_tensor(writer: Any, name: str, array: np.ndarray, kind: Any) -> None:
    """Vectors, and rows that do not divide into blocks of 32, stay F32."""
    quantised = kind.name.startswith("Q")
    if array.ndim == 1 or (quantised and array.shape[-1] % 32):
        kind = gguf.GGMLQuantizationType.F32
    if kind.name in ("F32", "F16"):
        writer.add_tensor(name, np.ascontiguousarray(array, np.float32 if kind.name == "F32" else np.float16))
    else:
        data = gguf.quantize(np.ascontiguousarray(array, np.float32), kind)
        writer.add_tensor(name, data, raw_dtype=kind)


def add_vocab(writer: Any, folder: Path) -> None:
    """A SentencePiece vocabulary with the scores that give tokenizer.json's merges."""
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    ranks = {"".join(merge): -float(i) for i, merge in enumerate(model["merges"])}
    kinds = [2, 3, 3] + [6 if token.startswith("<0x") else 1 for token in tokens[3:]]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([ranks.get(token, -1e6) for token in tokens])
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)


def continued(path: Path, backend: ml.Backend, prompt: Any, tokens: int) -> tuple[int, ...]:
    with Generator(load_model(path, backend), None) as generator:
        return generator.complete([prompt], GenerationOptions(tokens, ignore_eos=True))[0].tokens


def logits(path: Path, backend: ml.Backend) -> np.ndarray:
    """Of every position of a short text, F32."""
    model, tokens = load_model(path, backend), [1, 20, 7, 99, 45, 3, 250, 11]
    cache = kvcache.CausalCache()
    cache.init(backend, ml.DType.F32, 1, 16, 16)
    batch = kvcache.Batch(range(len(tokens)), [0] * len(tokens), inputs=tokens)
    with backend.new_context() as ctx:
        cache.start_forward(ctx, batch)
        found = model.forward(ctx, batch, cache).to_numpy()
    cache.close()
    return found


def test_half_split_rows_undoes_the_permutation_of_llama_cpp() -> None:
    rows = np.arange(12).reshape(12, 1)
    config = type("C", (), {"heads": 2, "kv_heads": 2})
    stored = permuted("self_attn.q_proj.weight", rows, config)
    assert stored.ravel().tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    np.testing.assert_array_equal(half_split_rows(stored, 2), rows)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def test_stories_through_gguf_and_its_own_vocabulary(
    stories: Path, stories_text: str, tmp_path: Path, kind: str, numpy_backend: ml.Backend
) -> None:
    path = tmp_path / "stories.gguf"
    write_gguf(path, stories, "llama", gguf.GGMLQuantizationType[kind], vocab=True)
    assert load_config(path) == load_config(stories)
    with Generator(load_model(path, numpy_backend), Tokenizer.load(path)) as generator:
        answer = generator.complete([""], GenerationOptions(200 if kind == "F32" else 20))[0]
    if kind == "F32":
        assert answer.text == stories_text
    else:
        start = "Once upon a time, there was a" if kind != "Q4_0" else "O"
        assert answer.text.startswith(start)
    error = np.abs(logits(path, numpy_backend) - logits(stories, numpy_backend)).max()
    assert error <= {"F32": 1e-6, "F16": 0.02, "BF16": 0.2, "Q8_0": 0.5, "Q4_0": 5}[kind]


@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("llama", {"tie_word_embeddings": False, "attention_bias": True}),
        ("qwen2", {"architectures": ["Qwen2ForCausalLM"]}),
        ("qwen3", {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "tie_word_embeddings": False}),
    ],
)
def test_the_families_through_gguf(
    make_model: Make, tmp_path: Path, arch: str, changes: dict[str, Any], numpy_backend: ml.Backend
) -> None:
    """Logits agree, so each family's row order, biases and norms are read for what they are."""
    folder, path = make_model(**changes), tmp_path / "model.gguf"
    write_gguf(path, folder, arch, by_layer=arch == "llama")
    assert load_config(path) == load_config(folder)
    np.testing.assert_array_equal(logits(path, numpy_backend), logits(folder, numpy_backend))


def test_a_tokenizer_from_scores_reads_as_the_original(stories: Path, tmp_path: Path) -> None:
    path = tmp_path / "stories.gguf"
    write_gguf(path, stories, "llama", vocab=True)
    ours, theirs = Tokenizer.load(path), Tokenizer.load(stories)
    for text in ("", "Once upon a time", "  two  spaces ", 'Lily\'s mom said,\n"no"', "naïve 😀 日本"):
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == text


def test_merges_from_scores_are_cuts_into_known_pieces() -> None:
    scores = {"a": -9.0, "b": -9.0, "c": -9.0, "ab": -1.0, "bc": -2.0, "abc": -3.0}
    assert merges_from_scores(scores) == [("a", "b"), ("b", "c"), ("a", "bc"), ("ab", "c")]


def metadata_file(path: Path, arch: str = "llama", **fields: Any) -> Path:
    """A GGUF file with the metadata of a small model, changed by ``fields``, and no layers' tensors."""
    given: dict[str, Any] = {
        "block_count": 1, "context_length": 16384, "embedding_length": 64, "feed_forward_length": 64,
        "attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-5, **fields,
    }  # fmt: skip
    writer = gguf.GGUFWriter(path, arch)
    for key, value in given.items():
        name = f"{arch}.{key}"
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, np.ndarray):
            writer.add_tensor(key, value)
        elif value is not None:
            writer.add_uint32(name, value)
    writer.add_tensor("token_embd.weight", np.zeros((32, 64), np.float32))
    write(writer)
    return path


def test_rope_scaling_in_gguf(tmp_path: Path) -> None:
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    untyped, old = {"rope.scaling.factor": 2.0}, {"rope.scale_linear": 2.0}
    for i, fields in enumerate((linear, untyped, old, old | {"rope.scaling.type": "none"})):
        found = load_config(metadata_file(tmp_path / f"{i}.gguf", **fields)).rope.scaling
        assert found == (ml.nn.LinearScaling(2.0) if i < 3 else None)
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 4096,
    }
    found = load_config(metadata_file(tmp_path / "y.gguf", **yarn)).rope
    expected = ml.nn.RopeSpec(32, scaling=ml.nn.YarnScaling(4.0, 4096))
    assert found.attention_factor == pytest.approx(expected.attention_factor)
    np.testing.assert_allclose(found.inverse_frequencies, expected.inverse_frequencies)


def test_llama_3_scaling_is_read_back_from_its_factors(tmp_path: Path) -> None:
    scaled = ml.nn.RopeSpec(32, 500000.0, scaling=ml.nn.Llama3Scaling(8.0, 1.0, 4.0, 8192))
    factors = ml.nn.RopeSpec(32, 500000.0).inverse_frequencies / scaled.inverse_frequencies
    fields: dict[str, Any] = {"rope.freq_base": 500000.0, "rope_freqs.weight": factors.astype(np.float32)}
    assert load_config(metadata_file(tmp_path / "a.gguf", **fields)).rope == scaled
    fields["rope_freqs.weight"] = factors.astype(np.float32) * np.float32(1.5)
    with pytest.raises(ModelError, match=r"rope_freqs\.weight is not the rope scaling of Llama 3"):
        load_config(metadata_file(tmp_path / "b.gguf", **fields))


@pytest.mark.parametrize(
    ("arch", "fields", "message"),
    [
        ("gemma", {}, "unsupported architecture 'gemma'; supported in GGUF are llama, qwen2, qwen3"),
        ("llama", {"block_count": None}, r"no metadata or tensor 'llama\.block_count'"),
        ("llama", {"expert_count": 8}, "mixtures of experts"),
        ("llama", {"attention.sliding_window": 128}, "sliding window of 128"),
        ("llama", {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "'longrope'"),
        ("llama", {"rope.scaling.type": "yarn"}, r"no metadata or tensor 'rope\.scaling\.factor'"),
        ("llama", {"rope.dimension_count": 16}, "partial rotation"),
        ("llama", {"attention.key_length": 32, "attention.value_length": 64}, "value_length=64"),
        ("llama", {"attention.head_count_kv": [1, 2]}, "differs between layers"),
    ],
)
def test_gguf_metadata_that_is_refused(
    tmp_path: Path, arch: str, fields: dict[str, Any], message: str
) -> None:
    path = metadata_file(tmp_path / "m.gguf", arch, **fields)
    with pytest.raises(ModelError, match=message) as caught:
        load_config(path)
    assert str(caught.value).startswith(str(path))


def test_gguf_files_that_are_broken(make_model: Make, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, make_model(), "llama")
    data = path.read_bytes()
    for broken in (b"", b"GGUF", b"nonsense" * 20, data[:500], data[:-100]):
        path.write_bytes(broken)
        with pytest.raises(ModelError, match="truncated or not a GGUF file"):
            open_weights(path)


def test_a_gguf_file_without_a_usable_vocabulary_says_what_to_do(make_model: Make, tmp_path: Path) -> None:
    folder, path = make_model(), tmp_path / "model.gguf"
    write_gguf(path, folder, "llama")
    with pytest.raises(ModelError, match=r"kind None.*put the model's tokenizer\.json next to the file"):
        Tokenizer.load(path)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    assert Tokenizer.load(path).encode("a") == Tokenizer.load(folder).encode("a")


# The model that ships.


def test_the_bundled_model_loads_whole(numpy_backend: ml.Backend) -> None:
    try:
        folder = bundled_model()
    except ModelError as error:
        pytest.skip(str(error))
    config = load_config(folder)
    check_weights(config, open_weights(folder))
    assert Tokenizer.load(folder).vocab_size <= config.vocab_size
    assert (folder / "model.safetensors").stat().st_size <= 4 * 2**20
    assert config.head_dim % 32 == 0
    assert config.kv_heads < config.heads
    assert len(continued(folder, numpy_backend, [1], 3)) == 3
