"""Tokenization and chat templates: special tokens, chats and errors of folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as FastTokenizer

from baton.checkpoint.tokenizer import Tokenizer
from baton.checkpoint.tokenizer_files import load_tokenizer
from baton.core.errors import InvalidRequest, ModelError
from tests.support.models import EOS_TOKEN_ID, save_tokenizer
from tests.support.tokenizer_folders import copy_with_settings, put_begin_token_first

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


def test_a_folder_without_a_model_is_named_as_such(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"{tmp_path} is not a model folder"):
        load_tokenizer(tmp_path)


def test_requested_special_tokens_are_not_skipped(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    token_ids = tokenizer.encode("the <s>quick</s> <s>fox", add_special_tokens=False)

    def spelled(shown: tuple[str, ...]) -> str:
        detokenizer = tokenizer.detokenizer(shown=shown)
        return "".join(map(detokenizer.push, token_ids)) + detokenizer.finish()

    assert spelled(("<s>", "no such")) == "the <s>quick <s>fox"
    assert spelled(("no such",)) == spelled(()) == tokenizer.decode(token_ids)


def test_accepted_roles_are_those_of_openai_and_of_the_template(
    folder: Path, tmp_path: Path
) -> None:
    template = "{% for m in messages %}{{ m.role if m.role == 'critic' else 'x' }} {% endfor %}"
    copy_with_settings(folder, tmp_path, chat_template=template)
    tokenizer = load_tokenizer(tmp_path)
    known = ("assistant", "developer", "function", "system", "tool", "user", "critic")

    assert tokenizer.render_chat([{"role": role, "content": ""} for role in known])
    with pytest.raises(InvalidRequest, match=r"messages\.1\.role is 'robot': choose one of") as no:
        tokenizer.render_chat([{"role": role, "content": ""} for role in ("user", "robot")])
    assert no.value.field == "messages.1.role"


def test_tools_are_rendered_where_the_template_reads_them(folder: Path, tmp_path: Path) -> None:
    reading = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    by_name = [{"name": "default", "template": ""}, {"name": "tool_use", "template": reading}]
    for template, supports_tools in ((reading, True), (by_name, True), ("tools", False)):
        copy_with_settings(folder, tmp_path, chat_template=template)
        assert load_tokenizer(tmp_path).supports_tools is supports_tools


def test_a_chat_is_encoded_without_further_special_tokens(folder: Path, tmp_path: Path) -> None:
    copy_with_settings(folder, tmp_path, chat_template="{{ bos_token }}{{ messages[0].content }}")
    put_begin_token_first(tmp_path)
    tokenizer = load_tokenizer(tmp_path)

    text = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    token_ids = tokenizer.encode(text, add_special_tokens=False)

    assert token_ids == tokenizer.encode("hi")
    assert token_ids.count(1) == 1


def test_a_template_file_wins_over_the_one_inside_the_settings(
    folder: Path, tmp_path: Path
) -> None:
    copy_with_settings(folder, tmp_path, chat_template="inside")
    (tmp_path / "chat_template.jinja").write_text("alone")

    assert load_tokenizer(tmp_path).render_chat(CHAT) == "alone"


def test_tools_pick_the_template_for_tools(folder: Path, tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools: {{ tools | length }}"},
    ]
    tokenizer = load_tokenizer(copy_with_settings(folder, tmp_path, chat_template=named))

    assert tokenizer.render_chat(CHAT) == "plain"
    assert tokenizer.render_chat(CHAT, variables={"tools": [{}, {}]}) == "tools: 2"


def test_a_template_gets_the_date_from_the_given_clock(folder: Path, tmp_path: Path) -> None:
    copy_with_settings(folder, tmp_path, chat_template="{{ strftime_now('%Y-%m-%d') }}")

    tokenizer = load_tokenizer(tmp_path, clock=lambda: datetime(2024, 2, 3, tzinfo=UTC))

    assert tokenizer.render_chat(CHAT) == "2024-02-03"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "refuses these messages"),
        ("{{ messages.__class__.__mro__ }}", "refuses these messages"),
        ("{% set _ = messages.append(1) %}", "refuses these messages"),
    ],
)
def test_an_error_raised_by_a_template_is_a_client_error(
    template: str, reason: str, folder: Path, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(copy_with_settings(folder, tmp_path, chat_template=template))

    with pytest.raises(InvalidRequest, match=reason):
        tokenizer.render_chat(CHAT)


def test_a_chat_needs_a_template(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(copy_with_settings(folder, tmp_path, chat_template=None))

    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.render_chat(CHAT)


def test_a_broken_template_is_a_model_error(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(copy_with_settings(folder, tmp_path, chat_template="{% if %}"))

    with pytest.raises(ModelError, match="chat template is broken"):
        tokenizer.render_chat(CHAT)


def test_end_tokens_come_from_the_generation_settings_first(folder: Path, tmp_path: Path) -> None:
    copy_with_settings(folder, tmp_path)
    assert load_tokenizer(tmp_path).eos_token_ids == (EOS_TOKEN_ID,)

    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))

    assert load_tokenizer(tmp_path).eos_token_ids == (5, 6)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b'{"model": {"type": "Riddle"}}'),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b"\xff"),
    ],
)
def test_an_error_of_a_folder_names_the_file(
    file: str, content: bytes | None, folder: Path, tmp_path: Path
) -> None:
    copy_with_settings(folder, tmp_path)
    (tmp_path / file).unlink() if content is None else (tmp_path / file).write_bytes(content)

    with pytest.raises(ModelError, match=file):
        load_tokenizer(tmp_path)


def test_a_character_is_emitted_once_it_is_complete(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    # No merge reaches across these bytes, so each is a token of its own.
    token_ids = tokenizer.encode("\N{GRINNING FACE}!")
    detokenizer = tokenizer.detokenizer()

    chunks = [detokenizer.push(token_id) for token_id in token_ids]

    assert len(token_ids) > 2
    assert chunks[-2:] == ["\N{GRINNING FACE}", "!"]
    assert "".join(chunks[:-2]) == ""


def test_an_incomplete_character_at_the_end_becomes_a_replacement_character(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    token_ids = tokenizer.encode("a\N{GRINNING FACE}")[:-1]
    detokenizer = tokenizer.detokenizer()

    chunks = [detokenizer.push(token_id) for token_id in token_ids]

    assert "".join(chunks) == "a"
    assert detokenizer.finish() == tokenizer.decode(token_ids)[1:] != ""


class CountingTokenizer(Tokenizer):
    """Counts the tokens that are decoded."""

    num_decoded = 0

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.num_decoded += len(token_ids)
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("name", ["\N{LATIN CAPITAL LETTER G WITH CEDILLA}", "<s>", "none"])
def test_tokens_that_complete_no_character_are_decoded_in_linear_time(
    folder: Path, name: str
) -> None:
    fast = FastTokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer = CountingTokenizer(fast, named_tokens={}, chat_templates={})
    token_ids = [fast.token_to_id(name) or 99_999] * 4000
    detokenizer = tokenizer.detokenizer()

    text = "".join(map(detokenizer.push, token_ids))

    assert text == ""
    assert tokenizer.num_decoded < 20 * len(token_ids)
    # Text is held back no longer than it takes to complete a character.
    rest = tokenizer.encode("so it is")
    broken = tokenizer.decode(token_ids)
    assert detokenizer.push(rest[0]) == broken + tokenizer.decode(rest[:1])
    assert detokenizer.push(*rest[1:]) + detokenizer.finish() == tokenizer.decode(rest[1:])


def test_spaces_between_text_chunks_are_kept() -> None:
    tokenizer = metaspace_tokenizer()
    detokenizer = tokenizer.detokenizer()

    chunks = [detokenizer.push(token_id) for token_id in (1, 3, 4, 5, 4)]

    assert chunks == ["", "hello", " world", " ", " world"]


def metaspace_tokenizer() -> Tokenizer:
    """Return a tokenizer like that of Llama 2: metaspace words with byte fallback."""
    words = ["<unk>", "<s>", "</s>", "▁hello", "▁world", "▁", *(f"<0x{b:02X}>" for b in range(256))]
    fast = FastTokenizer(
        models.BPE(
            vocab={word: i for i, word in enumerate(words)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    fast.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    fast.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return Tokenizer(fast, named_tokens={}, chat_templates={})
