"""Hypothesis strategies for hostile messages, derived from the proto descriptors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

Bytes = st.SearchStrategy[bytes]

MOST_REPEATED = 4
DEEPEST = 4

INTEGERS = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_FIXED64: (0, 2**64 - 1),
}
TEXTS = st.sampled_from(
    ["", "\0", "a", "..", "🙂", "x" * 5_000, "é" * 100_000, "127.0.0.1:1", "unix:///tmp/x", "%s{}"]
) | st.text(max_size=20)
NUMBERS = st.sampled_from([0.0, -1.0, 1.0, 1e-300, 1e300, math.nan, math.inf, -math.inf])


def messages(descriptor: Descriptor, depth: int = 0) -> st.SearchStrategy[Message]:
    """Return messages of this type. Each field is missing or has an extreme value."""
    kind: Callable[..., Message] = message_factory.GetMessageClass(descriptor)
    fields = {
        field.name: values
        for field in descriptor.fields
        if (values := _values(field, depth)) is not None
    }
    some = st.fixed_dictionaries({}, optional=fields)
    return some.map(lambda given: kind(**given))


def _values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any] | None:
    """Return the values of a field, or None at the maximum depth of nested messages."""
    of_message = field.message_type
    if of_message is not None and of_message.GetOptions().map_entry:
        keys, values = (_one(of_message.fields_by_name[name], depth) for name in ("key", "value"))
        return st.dictionaries(keys, values, max_size=MOST_REPEATED)
    if of_message is not None and depth == DEEPEST:
        return None
    one = _one(field, depth)
    return st.lists(one, max_size=MOST_REPEATED) if field.is_repeated else one


def _one(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return messages(field.message_type, depth + 1)
    if field.type in INTEGERS:
        least, most = INTEGERS[field.type]
        return st.sampled_from([least, most, 0, 1]) | st.integers(least, most)
    if field.type == FieldDescriptor.TYPE_ENUM:
        return st.sampled_from([0, 1, 99, 2**31 - 1])
    if field.type == FieldDescriptor.TYPE_STRING:
        return TEXTS
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=64)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return st.booleans()
    return NUMBERS


def on_the_wire(descriptor: Descriptor) -> Bytes:
    """Return serialized messages, some corrupted, and random bytes."""
    whole = messages(descriptor).map(lambda one: one.SerializeToString())
    return st.one_of(whole, whole.flatmap(_spoilt), st.binary(max_size=200))


def _spoilt(whole: bytes) -> Bytes:
    if not whole:
        return st.binary(max_size=8)
    places = st.lists(
        st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 255)), min_size=1, max_size=3
    )
    return places.map(lambda changes: _changed(whole, changes))


def _changed(whole: bytes, changes: Sequence[tuple[int, int]]) -> bytes:
    spoilt = bytearray(whole)
    for place, value in changes:
        spoilt[place] = value
    return bytes(spoilt)
