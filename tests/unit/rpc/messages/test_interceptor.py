"""Field count of a serialized message, before it is parsed."""

from __future__ import annotations

import pytest

from baton.rpc.errors import MessageTooLarge, Unreadable
from baton.rpc.messages.interceptor import MAX_FIELDS, SMALL_BYTES, check_num_fields
from baton.v1 import inference_pb2, sampling_pb2

REQUEST = inference_pb2.GenerateRequest.DESCRIPTOR


def test_a_long_prompt_is_few_fields() -> None:
    text = inference_pb2.GenerateRequest(text="a" * (1 << 20), request_id="a")
    ids = inference_pb2.GenerateRequest(
        token_ids=sampling_pb2.TokenIds(ids=range(1 << 20)),
        sampling=sampling_pb2.SamplingParams(temperature=0.5, logit_bias={300: 1.0}, top_k=5),
    )

    for message in (text, ids):
        check_num_fields(message.SerializeToString(), REQUEST, max_fields=8)


def test_nested_entries_of_lists_and_maps_are_counted() -> None:
    turns = [inference_pb2.ChatMessage()] * (SMALL_BYTES // 2)
    raw = inference_pb2.GenerateRequest(chat=inference_pb2.Chat(messages=turns)).SerializeToString()

    check_num_fields(raw, REQUEST, max_fields=1 + len(turns))
    with pytest.raises(MessageTooLarge, match=f"more than {len(turns)} fields"):
        check_num_fields(raw, REQUEST, max_fields=len(turns))


def test_wire_groups_are_refused() -> None:
    begin_group = b"\x0b"  # whose fields would not be seen

    with pytest.raises(Unreadable, match="wire type 3"):
        check_num_fields(begin_group + b"\x0a\x00" * SMALL_BYTES, REQUEST)


def test_truncated_messages_are_left_to_the_parser() -> None:
    check_num_fields(b"\x18\x01" * (SMALL_BYTES // 2) + b"\x80", REQUEST, max_fields=MAX_FIELDS)
