"""Turning messages into a prompt: with the model's own chat template, or by concatenation."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from kvcache_engine.checkpoints.gguf import GGUFFile, open_gguf
from kvcache_engine.checkpoints.source import read_json
from kvcache_engine.errors import ModelError
from kvcache_engine.serve.asked import Template, Text
from kvcache_engine.serve.errors import ApiError

__all__ = ["template_of"]

_GGUF_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator",
                "cls": "cls", "mask": "mask"}  # fmt: skip
"""Special tokens, and their names in GGUF metadata."""


def template_of(path: Path) -> Template:
    """The template from a model's folder or beside its file, else from the GGUF file itself.

    A model without a template is a base model, which continues the texts. Raises ModelError for a template
    that cannot be read or compiled.
    """
    folder = path if path.is_dir() else path.parent
    own, file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = _config(own)
    if file.is_file():
        source: Any = _read(file)
    else:
        source, file = config.get("chat_template"), own
    special = {**_special_tokens(_config(folder / "special_tokens_map.json")), **_special_tokens(config)}
    if path.suffix == ".gguf":
        metadata = open_gguf(path)
        special = {**_stored_tokens(metadata), **special}
        if source is None:
            source, file = metadata.get("tokenizer.chat_template"), path
    if isinstance(source, list):  # several named templates
        source = next((each.get("template") for each in source if each.get("name") == "default"), None)
    if not isinstance(source, str):
        return lambda messages: Text("\n".join(message["content"] for message in messages))
    try:
        compiled = _compiled(source)
    except Exception as error:  # templates may raise anything in jinja
        line = f", line {error.lineno}" if hasattr(error, "lineno") else ""
        raise ModelError(f"{file}: the chat template{line}: {error}") from error

    def render(messages: list[dict[str, str]]) -> Text:
        variables = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return Text(compiled.render(variables, **special), bos=False)
        except Exception as error:  # templates may raise anything for unexpected messages
            message = f"the model's chat template refuses the messages: {error}"
            raise ApiError(400, message, "messages") from None

    return render


def _compiled(source: str) -> Any:
    """Compile with the names, filters and tags that chat templates expect, which are those of
    transformers.
    """
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}``, which marks the assistant's text for training, has no effect here."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(
                parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
            )

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        """A filter like Jinja's, which however escapes HTML and sorts keys."""
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _config(file: Path) -> dict[str, Any]:
    config = read_json(file) if file.is_file() else {}
    return config if isinstance(config, dict) else {}


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file}: cannot be read ({error})") from error


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The special tokens that are set, by name: bos_token, pad_token, and a model's own."""
    more = config.get("extra_special_tokens")
    named = {**config, **(more if isinstance(more, dict) else {})}
    texts = {
        name: token.get("content") if isinstance(token, dict) else token
        for name, token in named.items()
        if name.endswith("_token")
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _stored_tokens(file: GGUFFile) -> dict[str, str]:
    tokens = file.get("tokenizer.ggml.tokens", [])
    ids = {f"{name}_token": file.get(f"tokenizer.ggml.{key}_token_id") for name, key in _GGUF_TOKENS.items()}
    return {name: tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)}
