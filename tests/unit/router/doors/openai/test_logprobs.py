"""Logprobs in the formats of OpenAI's APIs, and the text of single tokens."""

from __future__ import annotations

import json
import math

import pytest

from baton.checkpoint.tokenizer import TokenText, spelled
from baton.core.output import TokenLogprobs
from baton.router.doors.openai.response.logprobs import (
    LOWEST,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)

CHOSEN_LAST = TokenLogprobs(3, -2.5, 3, ((1, -0.5), (2, -math.inf)))


def token_text(token_id: int) -> TokenText:
    return TokenText(f"<{token_id}>", bytes([token_id]))


def test_logprobs_contain_the_chosen_token_and_the_top_tokens() -> None:
    reported = completion_logprobs((3,), (CHOSEN_LAST,), 2, token_text, 10)

    assert reported == {
        "text_offset": [10],
        "token_logprobs": [-2.5],
        "tokens": ["<3>"],
        "top_logprobs": [{"<1>": -0.5, "<2>": LOWEST, "<3>": -2.5}],
    }


def test_the_first_prompt_token_has_no_logprob() -> None:
    reported = completion_logprobs((7, 3), (None, CHOSEN_LAST), 1, token_text, 0)

    assert reported["token_logprobs"] == [None, -2.5]
    assert reported["top_logprobs"][0] is None
    assert reported["text_offset"] == [0, 3]


def test_chat_logprobs_have_bytes_and_the_requested_number_of_tokens() -> None:
    [reported] = chat_logprobs((CHOSEN_LAST,), 1, token_text)["content"]

    assert reported == {
        "token": "<3>",
        "logprob": -2.5,
        "bytes": [3],
        "top_logprobs": [{"token": "<1>", "logprob": -0.5, "bytes": [1]}],
    }


def test_prompt_logprobs_are_keyed_by_token_id_and_have_ranks() -> None:
    reported = prompt_logprobs((None, CHOSEN_LAST), 1, token_text)

    assert isinstance(reported, list)
    assert reported[0] is None
    assert reported[1] == {
        "1": {"logprob": -0.5, "rank": 1, "decoded_token": "<1>"},
        "3": {"logprob": -2.5, "rank": 3, "decoded_token": "<3>"},
    }


def test_logprobs_are_valid_json() -> None:
    reported = [
        chat_logprobs((CHOSEN_LAST,), 2, token_text),
        prompt_logprobs((CHOSEN_LAST,), 2, token_text),
    ]
    json.dumps(reported, allow_nan=False)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("Ġfox", " fox", TokenText(" fox", b" fox")),
        ("Ã", "\ufffd", TokenText("\ufffd", b"\xc3")),  # half of a letter, byte by byte
        ("<0xE6>", "\ufffd", TokenText("\ufffd", b"\xe6")),
        ("▁fox", "fox", TokenText(" fox", b" fox")),
        ("\ufffd", "\ufffd", TokenText("\ufffd", "\ufffd".encode())),
    ],
)
def test_a_token_that_is_a_partial_character_has_its_bytes(
    name: str, text: str, expected: TokenText
) -> None:
    assert spelled(name, text) == expected
