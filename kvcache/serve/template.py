"""Messages to a prompt: the model's own chat template, or one text after another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvcache.serve.asked import Template, Text
from kvcache.serve.errors import ApiError

__all__ = ["template_of"]


def template_of(path: Path) -> Template:
    """From what lies in a model's folder, or beside its file.

    A model without a template is a base model: it goes on with the texts.
    """
    folder = path if path.is_dir() else path.parent
    config = _config(folder)
    source = _source(folder, config)
    if source is None:
        return lambda messages: Text("\n".join(message["content"] for message in messages))
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _refuse
    compiled = environment.from_string(source)
    special = {name: _text(config.get(name)) for name in ("bos_token", "eos_token")}

    def render(messages: list[dict[str, str]]) -> Text:
        try:
            text = compiled.render(messages=messages, add_generation_prompt=True, **special)
        except TemplateError as error:
            raise ApiError(
                400, f"the model's chat template refuses the messages: {error}", "messages"
            ) from None
        return Text(text, bos=False)

    return render


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found if isinstance(found, dict) else {}


def _source(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        found = next((each.get("template") for each in found if each.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def _text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _refuse(message: str) -> None:
    raise ApiError(400, message, "messages")
