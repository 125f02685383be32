"""Limit on the number of fields of a protobuf message, checked before parsing. Pure.

An empty message in a list takes two bytes on the wire and thirty times as many once parsed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from google.protobuf.descriptor import Descriptor

from baton.rpc.errors import MessageTooLarge, Unreadable

# Messages up to this size are not checked.
SMALL_BYTES = 1 << 16
# Includes entries of maps and lists, at every depth. A packed list of numbers is one field.
MAX_FIELDS = 1 << 16
VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5


def check_num_fields(raw: bytes, kind: Descriptor, max_fields: int = MAX_FIELDS) -> None:
    """Raises MessageTooLarge, or Unreadable for wire types that Baton's messages do not use.

    Other malformed messages pass: the parser reports their errors.
    """
    if len(raw) <= SMALL_BYTES:
        return
    try:
        _check(raw, kind, max_fields)
    except IndexError:
        return


def _check(raw: bytes, kind: Descriptor, max_fields: int) -> None:
    num_fields = 0
    spans = [(0, len(raw), kind)]
    while spans:
        at, end, within = spans.pop()
        messages = _messages(within)
        while at < end:
            num_fields += 1
            if num_fields > max_fields:
                raise MessageTooLarge(
                    f"the message has more than {max_fields} fields, including entries of lists "
                    "and maps; send shorter ones"
                )
            # Fast path for one-byte varints, which most are, in this per-field loop.
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
                raise Unreadable(f"wire type {wire_type} does not occur in messages of this method")


@lru_cache(maxsize=64)
def _messages(kind: Descriptor) -> Mapping[int, Descriptor]:
    """Return the message types of the fields that are messages, by field number."""
    return {
        field.number: field.message_type for field in kind.fields if field.message_type is not None
    }


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """Return the varint at `at` and the index after it."""
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
