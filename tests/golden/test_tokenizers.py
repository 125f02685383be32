"""Tokens and chats equal those of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from baton.checkpoint.tokenizer_files import load_tokenizer
from tests.support.models import save_tokenizer
from tests.support.tokenizer_folders import copy_with_settings, put_begin_token_first

TEXTS = ("", "hello", " the  quick\n\nbrown", "naïve café 東京 🙂", "</s> inside", "\x00\x7f")
CHAT = (
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi <b>&</b>"},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 2}))
    return folder


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True, "add_eos_token": True}])
@pytest.mark.parametrize("begins", [False, True])
def test_token_ids_and_text_equal_those_of_transformers(
    text: str, flags: dict[str, bool], begins: bool, folder: Path, tmp_path: Path
) -> None:
    copy_with_settings(folder, tmp_path, **flags)
    if begins:
        put_begin_token_first(tmp_path)
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)

    token_ids = ours.encode(text)

    assert token_ids == theirs(text)["input_ids"]
    assert (
        ours.encode(text, add_special_tokens=False)
        == theirs(text, add_special_tokens=False)["input_ids"]
    )
    assert ours.decode(token_ids) == theirs.decode(token_ids, skip_special_tokens=True)
    assert ours.decode(token_ids, skip_special_tokens=False) == theirs.decode(token_ids)


@pytest.mark.parametrize(
    "template",
    [
        (
            "{% for m in messages %}\n  {% if m.role == 'user' %}\n<u>{{ m.content | tojson }}"
            "  {% endif %}\n{% endfor %}"
        ),
        (
            "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
            "{{ m['content'] }}{{ eos_token }}{% endfor %}"
        ),
        (
            "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
            "{% if add_generation_prompt %}<|a|>{% endif %}{% if tools is none %}-{% endif %}"
        ),
    ],
)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_a_chat_is_rendered_as_transformers_renders_it(
    template: str, add_generation_prompt: bool, folder: Path, tmp_path: Path
) -> None:
    copy_with_settings(folder, tmp_path, chat_template=template)
    theirs = AutoTokenizer.from_pretrained(tmp_path)

    text = load_tokenizer(tmp_path).render_chat(CHAT, add_generation_prompt=add_generation_prompt)

    assert text == theirs.apply_chat_template(
        list(CHAT), add_generation_prompt=add_generation_prompt, tokenize=False
    )
