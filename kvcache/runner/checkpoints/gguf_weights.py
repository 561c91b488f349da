"""The tensors of a GGUF file under Hugging Face's names and in Hugging Face's row order."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvcache.runner.checkpoints.gguf_config import Metadata
from kvcache.runner.checkpoints.gguf_file import GGUFFile
from kvcache.runner.checkpoints.source import WeightSource

__all__ = ["GGUFSource", "gguf_name", "half_split_rows"]

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROTATED = re.compile(r"blk\.\d+\.attn_([qk])\.(weight|bias)")


class GGUFSource(WeightSource):
    """A GGUF file's weights.

    llama.cpp stores the query and key rows of its ``llama`` architecture (Llama and Mistral) for the
    interleaved form of rotary embeddings; they are put back into Hugging Face's half-split order, so
    that one RopeSpec serves both formats. Qwen's are stored half-split.
    """

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._names = {hf: name for name in self._file.names if (hf := gguf_name(name)) is not None}
        self._heads: dict[str, int] = {}
        if self._file.get("general.architecture") == "llama":
            data = Metadata(self._file, "llama")
            if heads := data.get("attention.head_count", 0):
                self._heads = {"q": heads, "k": data.get("attention.head_count_kv", heads)}

    def __getitem__(self, name: str) -> np.ndarray:
        stored = self._stored(name)
        array = self._file.array(stored)
        rotated = _ROTATED.fullmatch(stored)
        if rotated and self._heads:
            return half_split_rows(array, self._heads[rotated[1]])
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.shape(self._stored(name))

    @property
    def nbytes(self) -> int:
        return self._file.nbytes

    @property
    def origin(self) -> Path:
        return self._file.path

    def _stored(self, name: str) -> str:
        try:
            return self._names[name]
        except KeyError:
            raise self._missing(name) from None


def gguf_name(name: str) -> str | None:
    """Hugging Face's name of a GGUF tensor; None for one that the model does not read."""
    if name in _TOP:
        return _TOP[name]
    block = _BLOCK.fullmatch(name)
    if block is None or block[2] not in _LAYER:
        return None
    return f"model.layers.{block[1]}.{_LAYER[block[2]]}.{block[3]}"


def half_split_rows(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows (pair 0 first half, pair 0 second half, pair 1 ...) -> (all first halves, all second halves).

    Per head of size 6, by row: 0 3 1 4 2 5 as stored -> 0 1 2 3 4 5. The inverse of ``permute`` in
    llama.cpp's convert_hf_to_gguf.py.
    """
    pairs = array.reshape(heads, -1, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)
