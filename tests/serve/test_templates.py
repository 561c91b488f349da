"""kvcache_engine.serve: prompts by a model's own chat template, as transformers makes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("starlette")

from kvcache_engine.errors import ModelError
from kvcache_engine.serve import template_of
from kvcache_engine.serve.errors import ApiError

USER = [{"role": "user", "content": "And God said"}]


def test_a_chat_template_of_the_model_is_used(tmp_path: Path) -> None:
    text = (
        "{{ bos_token }}{% for m in messages %}"
        "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    )
    config = {"bos_token": {"content": "<s>"}, "chat_template": text}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    render = template_of(tmp_path)
    rendered = render([{"role": "user", "content": "Hi"}])
    assert (rendered.text, rendered.bos) == ("<s><user>Hi\n", False)
    with pytest.raises(ApiError, match="no tools"):
        render([{"role": "tool", "content": "x"}])


TEMPLATES = {
    "tools": "{% if tools is not none or documents is not none %}tools{% endif %}{{ messages[0].content }}",
    "json": "{{ messages | tojson }} {{ messages | tojson(indent=1, sort_keys=true, ensure_ascii=true) }}",
    "time": "{{ strftime_now('%%') }}",
    "loops": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "generation": "{% set x = 1 %}{% generation %}\n {% set x = 2 %}{{ x }}{% endgeneration %}\n{{ x }}",
    "tokens": "{{ bos_token }}{{ pad_token }}{{ image_token }}{{ unk_token is defined }}{{ cls_token }}",
    "prompt": "{{ messages[1].content }}{% if add_generation_prompt %}>{% endif %}",
}


@pytest.mark.parametrize("text", TEMPLATES.values(), ids=TEMPLATES)
def test_a_chat_template_is_rendered_as_transformers_does(text: str, tmp_path: Path) -> None:
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    empty = tokenizers.Tokenizer(tokenizers.models.BPE())
    more = {"image_token": "<img>"}
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=empty,
        bos_token="<s>",
        pad_token="<p>",
        extra_special_tokens=more,
        chat_template=text,
    )
    theirs.save_pretrained(tmp_path)
    messages = [{"role": "user", "content": "<Wörd>'&"}, {"role": "assistant", "content": "x"}]
    rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert template_of(tmp_path)(messages).text == rendered


def test_a_template_that_fails_is_told_with_its_file_or_as_a_bad_request(tmp_path: Path) -> None:
    file = tmp_path / "chat_template.jinja"
    for text in (b"\n{% if %}", b"\n{{ 1 | nothing }}", b"\xff"):
        file.write_bytes(text)
        with pytest.raises(ModelError, match=f"{file}: (the chat template, line 2: |cannot be read)"):
            template_of(tmp_path)
    for text in (b"{{ 1 + 'a' }}", b"{{ nothing | tojson }}", b"{{ 1 // 0 }}", b"{{ nothing.x }}"):
        file.write_bytes(text)
        with pytest.raises(ApiError, match="the model's chat template refuses the messages") as caught:
            template_of(tmp_path)(USER)
        assert caught.value.status == 400
    file.unlink()
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config.json: not valid JSON"):
        template_of(tmp_path)


def test_a_gguf_file_has_its_chat_template_and_special_tokens(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token }}")
    writer.add_token_list(["<s>", "</s>", "<p>"])
    for add, token in (
        (writer.add_bos_token_id, 0),
        (writer.add_eos_token_id, 1),
        (writer.add_pad_token_id, 2),
    ):
        add(token)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert template_of(tmp_path / "m.gguf")(USER).text == f"<s>{USER[0]['content']}</s><p>"
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>", "pad_token": null}')
    assert template_of(tmp_path / "m.gguf")(USER).text == f"<s>{USER[0]['content']}<end><p>"
    (tmp_path / "chat_template.jinja").write_text("beside")
    assert template_of(tmp_path / "m.gguf")(USER).text == "beside"
