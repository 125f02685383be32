"""Prompts of embeddings, which clients send as safetensors in base64. Pure.

Nothing is unpickled. The rows are divided into pictures (`core.media`), so that prompts that begin
with the same rows share cached KV.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize

from baton.core.errors import InvalidRequest
from baton.core.media import MediaSegment, Picture
from baton.router.values import TokenPrompt

FIELD = "prompt_embeds"
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
Tensors = list[tuple[str, dict[str, Any]]]  # with their names
SEGMENT_ROWS = 128  # a multiple of usual block sizes
PLACEHOLDER = 0  # token id of all rows
MAX_QUOTED = 200  # characters of a client's own in an error
HOW = "send safetensors in base64, with one tensor [tokens, hidden_size]"


def prompt_of_embeds(text: object, size: int, max_model_len: int | None) -> TokenPrompt:
    """Return the prompt of embeddings of `size` numbers. Raises InvalidRequest."""
    data, dtype, num_rows = _read(text, size)
    if max_model_len is not None and num_rows > max_model_len:
        raise _wrong(f"has {num_rows} rows; this model's context has {max_model_len} tokens")
    row_bytes = len(data) // num_rows
    pictures: dict[bytes, Picture] = {}
    media: list[MediaSegment] = []
    for start in range(0, num_rows, SEGMENT_ROWS):
        rows = data[start * row_bytes : (start + SEGMENT_ROWS) * row_bytes]
        count = len(rows) // row_bytes
        digest = hashlib.sha256(f"{FIELD} {dtype} {size}\n".encode() + rows).digest()
        pictures[digest] = Picture(digest, count, size, rows, dtype)
        media.append(MediaSegment(start, count, digest))
    return TokenPrompt((PLACEHOLDER,) * num_rows, tuple(media), tuple(pictures.values()))


def _read(text: object, size: int) -> tuple[bytes, str, int]:
    """Return the numbers, their dtype, and the number of rows."""
    if not isinstance(text, str):
        raise _wrong(f"is no text; {HOW}")
    try:
        tensors: Tensors = deserialize(base64.b64decode(text, validate=True))  # type: ignore[no-untyped-call]
    except (binascii.Error, ValueError, SafetensorError) as error:
        raise _wrong(f"cannot be read ({_cut(error)}); {HOW}") from None
    if len(tensors) != 1:
        raise _wrong(f"has {len(tensors)} tensors; {HOW}")
    [(_, tensor)] = tensors
    shape, dtype, data = tensor["shape"], DTYPES.get(tensor["dtype"]), bytes(tensor["data"])
    if dtype is None:
        raise _wrong(f"is {tensor['dtype']}; it must be one of {', '.join(DTYPES)}")
    if len(shape) != 2 or shape[1] != size or not shape[0]:
        raise _wrong(f"has the shape {_cut(shape)}; this model takes [tokens, {size}]")
    if not _are_finite(data, dtype):
        raise _wrong("has a number that is not finite")
    return data, dtype, shape[0]


def _are_finite(data: bytes, dtype: str) -> bool:
    if dtype == "bfloat16":
        return bool(((np.frombuffer(data, "<u2") & 0x7F80) != 0x7F80).all())
    return bool(np.isfinite(np.frombuffer(data, "<f4" if dtype == "float32" else "<f2")).all())


def _cut(quoted: object) -> str:
    text = str(quoted)
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}..."


def _wrong(fault: str) -> InvalidRequest:
    return InvalidRequest(f"{FIELD} {fault}", FIELD)
