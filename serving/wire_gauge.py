"""Number of fields in a protobuf message, counted before it is parsed. Pure.

An empty message in a list takes two bytes on the wire and thirty times as many once it is parsed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from google.protobuf.descriptor import Descriptor

from serving.errors import MessageTooLarge, Unreadable

# Messages up to here are parsed as they are.
SMALL_BYTES = 1 << 16
# Entries of maps and lists, of messages and what is in them; packed numbers are one field together.
MAX_FIELDS = 1 << 16
VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5


def check_num_fields(raw: bytes, kind: Descriptor, most: int = MAX_FIELDS) -> None:
    """Raises MessageTooLarge, and Unreadable for what no message of ours holds.

    What is malformed otherwise passes: parsing tells what is wrong with it.
    """
    if len(raw) <= SMALL_BYTES:
        return
    try:
        _check(raw, kind, most)
    except IndexError:
        return


def _check(raw: bytes, kind: Descriptor, most: int) -> None:
    num_fields = 0
    spans = [(0, len(raw), kind)]
    while spans:
        at, end, within = spans.pop()
        messages = _messages(within)
        while at < end:
            num_fields += 1
            if num_fields > most:
                raise MessageTooLarge(
                    f"the message has more than {most} fields, entries of lists and maps included; "
                    "send shorter ones"
                )
            # Numbers of one byte, as most are, without a call: this is walked for each field.
            tag = raw[at]
            tag, at = (tag, at + 1) if tag < 0x80 else _varint(raw, at)
            wire_type = tag & 7
            if wire_type == LENGTH:
                size = raw[at]
                size, at = (size, at + 1) if size < 0x80 else _varint(raw, at)
                inner = messages.get(tag >> 3)
                if inner is not None:
                    spans.append((at, at + size, inner))
                at += size
            elif wire_type == VARINT:
                _, at = _varint(raw, at)
            elif wire_type in (FIXED64, FIXED32):
                at += 8 if wire_type == FIXED64 else 4
            else:
                raise Unreadable(f"wire type {wire_type} is in no message of this method")


@lru_cache(maxsize=64)
def _messages(kind: Descriptor) -> Mapping[int, Descriptor]:
    """The types of its fields that are messages, by number."""
    return {one.number: one.message_type for one in kind.fields if one.message_type is not None}


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """The number at this place, and the place behind it."""
    byte = raw[at]
    if byte < 0x80:
        return byte, at + 1
    number, shift = byte & 0x7F, 7
    while byte >= 0x80:
        at += 1
        byte = raw[at]
        number |= (byte & 0x7F) << shift
        shift += 7
    return number, at + 1
