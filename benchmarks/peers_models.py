"""What stands in for the tokenizers and models that the peers' tests would download."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

__all__ = ["SHAPE", "tokenizer"]

VOCABULARY = 128
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
"""Of the models, which have random weights."""

_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer(**options: Any) -> Any:
    """A tokenizer with a token for each printable character.

    Token 0 is "!", as in the vocabularies of GPT-2 and Qwen, which some tests rely on. The end of the text
    lies beyond the models' vocabulary: random weights never end it.
    """
    characters = [*map(chr, range(ord("!"), ord("~") + 1)), " ", "\n"]
    ids = {character: i for i, character in enumerate(characters)}
    inner = Tokenizer(models.BPE({**ids, "<pad>": len(ids), "<end>": VOCABULARY}, [], unk_token="<pad>"))
    inner.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", unk_token="<pad>", eos_token="<end>", **options
    )
    made.chat_template = _TEMPLATE
    return made
