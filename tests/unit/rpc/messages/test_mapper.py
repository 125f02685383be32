"""Mapping between messages and values by their fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest

from baton.core.ids import HandoffId
from baton.core.legs import LegKind
from baton.rpc.errors import UnsupportedInput
from baton.rpc.messages.mapper import Converter, Mapper
from baton.v1 import kv_link_pb2, node_pb2, sampling_pb2


@dataclass(frozen=True)
class Naming:
    block_size: int
    model_salt: str = "salt"
    hash_seed: int = 7
    max_shareable_prompt_len: int | None = None
    needs_snapshot: bool = False


class Writes(NamedTuple):
    handoff_id: HandoffId
    num_written: int = 0
    digest: int | None = None


@dataclass(frozen=True)
class Lists:
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    banned_sequences: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Order:
    kind: LegKind


LISTS = ("stop_token_ids", "allowed_token_ids", "banned_sequences")
OTHERS = set(sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name).difference(LISTS)


def test_absent_numbers_and_texts_are_zero_whatever_the_default() -> None:
    absent = node_pb2.PrefixNaming()

    assert Mapper(Naming, node_pb2.PrefixNaming).from_message(absent) == Naming(0, "", 0)


@pytest.mark.parametrize("limit", [None, 0, 9])
def test_optional_fields_are_none_or_the_sent_value(limit: int | None) -> None:
    mapper = Mapper(Naming, node_pb2.PrefixNaming)

    message = mapper.to_message(Naming(16, max_shareable_prompt_len=limit))

    assert message.HasField("max_shareable_prompt_len") == (limit is not None)
    assert mapper.from_message(message) == Naming(16, max_shareable_prompt_len=limit)


def test_named_tuples_and_nested_values_are_mapped() -> None:
    mapper = Mapper(Writes, kv_link_pb2.Writing)
    writes = Writes(HandoffId("r", 2), 3, 0)

    assert mapper.from_message(mapper.to_message(writes)) == writes
    assert mapper.from_message(kv_link_pb2.Writing()) == Writes(HandoffId("", 0))


@pytest.mark.parametrize("lists", [Lists(), Lists((1, 2), (), ((3,), (4, 5)))])
def test_lists_and_messages_that_wrap_one_are_tuples(lists: Lists) -> None:
    mapper = Mapper(Lists, sampling_pb2.SamplingParams, unmapped=OTHERS)

    assert mapper.from_message(mapper.to_message(lists)) == lists


def test_enums_are_mapped_by_their_names() -> None:
    others = set(node_pb2.LegOrder.DESCRIPTOR.fields_by_name) - {"kind"}
    mapper = Mapper(Order, node_pb2.LegOrder, unmapped=others)

    assert mapper.to_message(Order(LegKind.DECODE)).kind == node_pb2.LEG_KIND_DECODE
    assert mapper.from_message(mapper.to_message(Order(LegKind.PREFILL))) == Order(LegKind.PREFILL)
    with pytest.raises(UnsupportedInput, match="LegKind 0 is unknown here"):
        mapper.from_message(node_pb2.LegOrder())


def test_a_converter_replaces_the_rule_of_its_field() -> None:
    doubled = Converter(lambda seed: seed // 2, lambda seed: 2 * seed)
    mapper = Mapper(Naming, node_pb2.PrefixNaming, converters={"hash_seed": doubled})

    message = mapper.to_message(Naming(16, hash_seed=4))

    assert message.hash_seed == 8
    assert mapper.from_message(message).hash_seed == 4


def test_a_field_on_one_side_only_is_an_error_unless_declared() -> None:
    with pytest.raises(TypeError, match="fields of Writes and Revoked differ"):
        Mapper(Writes, kv_link_pb2.Revoked)

    mapper = Mapper(Writes, kv_link_pb2.Revoked, unmapped=("num_written", "digest"))

    message = mapper.to_message(Writes(HandoffId("r", 1), 5))
    assert mapper.from_message(message, num_written=5) == Writes(HandoffId("r", 1), 5)
