"""A tokenizer built from the vocabulary in a GGUF file. Two kinds cover the Llama family: "llama", a
SentencePiece BPE whose merges follow from the scores, and "gpt2", a byte-level BPE with stored merges and a
named pre-tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcache_engine.checkpoints.gguf import GGUFFile
from kvcache_engine.errors import ModelError

__all__ = ["merges_from_scores", "tokenizer_from_gguf"]

_CONTROL, _USER = 3, 4  # llama.cpp's token types
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _LLAMA3.replace("{1,3}", ""),
    "deepseek-r1-qwen": _LLAMA3.replace("{1,3}", ""),
    "gpt-2": None,
    "default": None,
}
_BOS_BY_DEFAULT = {"llama", "llama-bpe", "llama3", "llama-v3"}


def tokenizer_from_gguf(file: GGUFFile) -> tuple[Any, list[int]]:
    """A ``tokenizers.Tokenizer``, and the ids that precede every text.

    Raises ModelError, with the remedy, for a vocabulary of another kind.
    """
    kind = file.get("tokenizer.ggml.model")
    builders = {"llama": _sentencepiece, "gpt2": _byte_level}
    if kind not in builders:
        raise ModelError(
            f"{file.path}: its vocabulary has the kind {kind!r}, not one of {', '.join(builders)}; "
            "put the model's tokenizer.json next to the file"
        )
    tokens = file.get("tokenizer.ggml.tokens", [])
    try:
        tokenizer = builders[kind](file, tokens)
        tokenizer.add_tokens(_added(file, tokens))
    except ModelError:
        raise
    except Exception as error:  # the Rust side raises bare Exception
        raise ModelError(
            f"{file.path}: its vocabulary cannot be used ({error}); put tokenizer.json next to it"
        ) from error
    return tokenizer, _prefix(file, kind)


def merges_from_scores(scores: dict[str, float]) -> list[tuple[str, str]]:
    """The merges of a SentencePiece BPE: every split of a piece into two pieces, best score first."""
    ids = {piece: i for i, piece in enumerate(scores)}
    merges = []
    for piece, score in scores.items():
        cuts = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        pairs = sorted((ids[a], ids[b], a, b) for a, b in cuts if a in ids and b in ids)
        merges += [(score, a, b) for _, _, a, b in pairs]
    merges.sort(key=lambda merge: -merge[0])
    return [(a, b) for _, a, b in merges]


def _sentencepiece(file: GGUFFile, tokens: Sequence[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = file.get("tokenizer.ggml.scores", [])
    types = file.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if len(scores) != len(tokens):
        raise ModelError(f"{file.path}: {len(scores)} scores for {len(tokens)} tokens of its vocabulary")
    plain = {
        token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind in (1, _USER)
    }
    unknown = tokens[file.get("tokenizer.ggml.unknown_token_id", 0)]
    vocab = {token: i for i, token in enumerate(tokens)}
    model = models.BPE(vocab, merges_from_scores(plain), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    spaced = file.get("tokenizer.ggml.add_space_prefix", True)
    steps = [normalizers.Prepend("▁")] if spaced else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, *([decoders.Strip(" ", 1, 0)] if spaced else [])])
    return tokenizer


def _byte_level(file: GGUFFile, tokens: Sequence[str]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    name = file.get("tokenizer.ggml.pre", "default")
    if name not in _WORDS:
        raise ModelError(
            f"{file.path}: its pre-tokenizer {name!r} is not one of {', '.join(_WORDS)}; "
            "put the model's tokenizer.json next to the file"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges", [])]
    whole = name.startswith("llama")  # Llama 3 does not split a word that is a token
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=whole))
    words = _WORDS[name]
    if words is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        cut = pre_tokenizers.Split(Regex(words), behavior="isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _added(file: GGUFFile, tokens: Sequence[str]) -> list[Any]:
    """Tokens that are matched before a text is split into words; control tokens decode to no text."""
    from tokenizers import AddedToken

    types = file.get("tokenizer.ggml.token_type", [])
    return [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (_CONTROL, _USER)
    ]


def _prefix(file: GGUFFile, kind: str) -> list[int]:
    pre = kind if kind == "llama" else file.get("tokenizer.ggml.pre", "default")
    bos = file.get("tokenizer.ggml.bos_token_id")
    wanted = file.get("tokenizer.ggml.add_bos_token", pre in _BOS_BY_DEFAULT)
    return [bos] if wanted and bos is not None else []
