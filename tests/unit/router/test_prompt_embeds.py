"""Embeddings in place of tokens: forms that are read, and hostile ones."""

from __future__ import annotations

import base64
import io
import json
import pickle

import pytest
import torch
from safetensors.torch import save

from baton.core.errors import InvalidRequest
from baton.router.prompt_embeds import prompt_of_embeds

SIZE = 4


def text_of(content: bytes) -> str:
    return base64.b64encode(content).decode()


def text_of_rows(rows: torch.Tensor, **others: torch.Tensor) -> str:
    return text_of(save({"prompt_embeds": rows, **others}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_are_divided_into_named_parts(dtype: torch.dtype) -> None:
    rows = torch.randn(300, SIZE).to(dtype)

    prompt = prompt_of_embeds(text_of_rows(rows), SIZE, None)

    assert prompt.token_ids == (0,) * 300
    assert [(each.start, each.num_tokens) for each in prompt.media] == [
        (0, 128),
        (128, 128),
        (256, 44),
    ]
    assert [each.digest for each in prompt.media] == [each.digest for each in prompt.pictures]
    found = b"".join(each.rgb for each in prompt.pictures)
    assert found == rows.view(torch.uint8).numpy().tobytes()


def test_equal_parts_are_sent_once_and_dtypes_are_apart() -> None:
    rows = torch.zeros(256, SIZE)

    prompt = prompt_of_embeds(text_of_rows(rows), SIZE, None)
    half = prompt_of_embeds(text_of_rows(rows.half()), SIZE, None)

    assert (len(prompt.media), len(prompt.pictures)) == (2, 1)
    assert prompt.pictures[0].digest != half.pictures[0].digest


def saved_by_torch(rows: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(rows, buffer)
    return buffer.getvalue()


def header(fields: object, data: bytes = b"") -> bytes:
    text = json.dumps(fields).encode()
    return len(text).to_bytes(8, "little") + text + data


ROWS = torch.ones(3, SIZE)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "is no text"),
        (["a"], "is no text"),
        ("", "cannot be read"),
        ("%%%%", "cannot be read"),
        (text_of(b"\xff" * 64), "cannot be read"),
        (text_of(saved_by_torch(ROWS)), "send safetensors in base64"),
        (text_of(pickle.dumps(ROWS.numpy())), "send safetensors in base64"),
        (text_of(save({"prompt_embeds": ROWS})[:-1]), "cannot be read"),
        (text_of(header({})), "has 0 tensors"),
        (text_of_rows(ROWS, other=ROWS.clone()), "has 2 tensors"),
        (text_of_rows(ROWS.double()), "is F64"),
        (text_of_rows(ROWS.int()), "is I32"),
        (text_of_rows(torch.ones(3)), r"has the shape \[3\]"),
        (text_of_rows(torch.ones(1, 3, SIZE)), r"this model takes \[tokens, 4\]"),
        (text_of_rows(torch.ones(3, SIZE + 1)), r"has the shape \[3, 5\]"),
        (text_of_rows(torch.ones(0, SIZE)), r"has the shape \[0, 4\]"),
        (text_of_rows(torch.ones(21, SIZE)), "has 21 rows; this model's context has 20"),
        *(
            (text_of_rows((ROWS * wrong).to(dtype)), "not finite")
            for dtype in (torch.float32, torch.float16, torch.bfloat16)
            for wrong in (float("nan"), float("inf"), float("-inf"))
        ),
        (
            text_of(
                header(
                    {"a": {"dtype": "F32", "shape": [1 << 40, SIZE], "data_offsets": [0, 1 << 44]}}
                )
            ),
            "cannot be read",
        ),
        (
            text_of(
                header(
                    {"a": {"dtype": "F32", "shape": [1] * 10_000, "data_offsets": [0, 4]}}, bytes(4)
                )
            ),
            "this model takes",
        ),
        (text_of(header({"a": {"dtype": "X" * 10_000}})), "send safetensors"),
        (text_of((1 << 62).to_bytes(8, "little") + b"{}"), "cannot be read"),
    ],
)
def test_hostile_embeddings_are_refused_by_name(given: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        prompt_of_embeds(given, SIZE, 20)

    assert refused.value.field == "prompt_embeds"
    assert "prompt_embeds" in str(refused.value)
    assert len(str(refused.value)) < 1000
