"""Mapping between protobuf messages and values, field by field. Pure.

A mapper pairs a dataclass or named tuple with a message type. It is compiled once, from the type
hints and the message's descriptor:

- Fields correspond by name. Names without a counterpart are declared when the mapper is built.
- Nested values, lists of them, enums and messages that only wrap a list are mapped by their types.
- A field that a message lacks gets the default of the value's field, or else the message's.
- None and empty lists are not sent, nor are nested values that equal the default of their field.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from types import NoneType
from typing import Any, Generic, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from baton.rpc.errors import UnsupportedInput

Value = TypeVar("Value")
Sent = TypeVar("Sent", bound=Message)
Convert = Callable[[Any], Any]


def same(item: Any) -> Any:
    """Return a number or text, which is the same on both sides."""
    return item


class Converter(NamedTuple):
    from_message: Convert = same
    to_message: Convert = same


SAME = Converter()


class Mapper(Generic[Value, Sent]):
    """Maps values of one type to messages of one type, and back."""

    def __init__(
        self,
        value: type[Value],
        message: type[Sent],
        *,
        converters: Mapping[str, Converter] | None = None,
        unmapped: Collection[str] = (),
    ) -> None:
        """`unmapped` are fields of either side that the caller converts, or that do not matter."""
        defaults, hints = _defaults(value), get_type_hints(value)
        descriptor: Any = message.DESCRIPTOR
        names = [name for name in defaults if name not in unmapped]
        # A field that one side gains later must not be dropped in silence.
        if set(names) != set(descriptor.fields_by_name) - set(unmapped):
            raise TypeError(f"fields of {value.__name__} and {descriptor.name} differ")
        self.value = value
        self._message = message
        self._always: list[tuple[str, Convert]] = []
        self._if_present: dict[str, Convert] = {}
        self._sent: list[tuple[str, object, Convert]] = []
        for name in names:
            field, default = descriptor.fields_by_name[name], defaults[name]
            converter = (converters or {}).get(name) or _converter(hints[name], field)
            if field.has_presence and default is MISSING and _has_none(hints[name]):
                raise TypeError(f"{value.__name__}.{name} needs the default None")
            if _stands_for_absence(default, field):
                self._if_present[name] = converter.from_message
            else:
                self._always.append((name, converter.from_message))
            unsent = None if default is MISSING or _is_plain(field) else default
            self._sent.append((name, unsent, converter.to_message))

    def from_message(self, message: Sent, **others: Any) -> Value:
        """Return the value. `others` are its fields that are not mapped."""
        return self.value(**self.fields_of(message), **others)

    def fields_of(self, message: Sent) -> dict[str, Any]:
        """Return the fields of the value, without those that take their defaults."""
        values = {
            name: getattr(message, name) if convert is same else convert(getattr(message, name))
            for name, convert in self._always
        }
        if self._if_present:
            # Messages have few of their optional fields, so this beats a look-up of each.
            for descriptor, value in message.ListFields():
                name = descriptor.name
                if name in self._if_present:
                    convert = self._if_present[name]
                    values[name] = value if convert is same else convert(value)
        return values

    def to_message(self, value: Value, **others: Any) -> Sent:
        """Return the message. `others` are its fields that are not mapped."""
        for name, unsent, convert in self._sent:
            item = getattr(value, name)
            if item is not None and item != unsent:
                others[name] = item if convert is same else convert(item)
        return self._message(**others)

    @property
    def converter(self) -> Converter:
        """Conversion of a field that holds a value of this type."""
        return Converter(self.from_message, self.to_message)


def _defaults(value: type) -> dict[str, Any]:
    """Return the default of each field, MISSING where it has none."""
    if not is_dataclass(value):
        given: Mapping[str, Any] = value._field_defaults  # type: ignore[attr-defined]
        return {name: given.get(name, MISSING) for name in value._fields}  # type: ignore[attr-defined]
    return {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(value)
    }


def _is_plain(field: FieldDescriptor) -> bool:
    """Return whether the field is a number or text, which is sent whatever the default is."""
    is_chosen = field.containing_oneof is not None and not _is_optional(field)
    return field.message_type is None and not field.is_repeated and not is_chosen


def _is_optional(field: FieldDescriptor) -> bool:
    """Return whether a field is declared `optional`: the only one of a oneof of its own."""
    oneof = field.containing_oneof
    return oneof is not None and oneof.name == f"_{field.name}"


def _stands_for_absence(default: object, field: FieldDescriptor) -> bool:
    """Return whether a message without the field means the default of the value's field."""
    if default is MISSING:
        return False
    if field.is_repeated:
        return not default
    return field.has_presence or (field.enum_type is None and default == field.default_value)


def _converter(hint: Any, field: FieldDescriptor) -> Converter:
    """Return the conversion by the types of both sides."""
    kind = _without_none(hint)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return Converter(dict)
    item = get_args(kind)[0] if field.is_repeated else kind
    one = _item_converter(item, hint, field)
    if not field.is_repeated:
        return one
    read, write = one
    if one == SAME:
        return Converter(lambda items: tuple(items[:]))  # a slice is read faster
    return Converter(
        lambda items: tuple([read(item) for item in items]),
        lambda values: [write(value) for value in values],
    )


def _item_converter(kind: Any, hint: Any, field: FieldDescriptor) -> Converter:
    if field.enum_type is not None:
        return enum_converter(kind, field.enum_type, has_none=_has_none(hint))
    if field.message_type is None:
        return SAME
    message = GetMessageClass(field.message_type)
    if get_origin(kind) is tuple:
        return _list_converter(kind, message)
    return Mapper(kind, message).converter


def _list_converter(kind: Any, message: type[Message]) -> Converter:
    """Return the conversion of a tuple to a message that only wraps a list."""
    descriptor: Any = message.DESCRIPTOR
    [(name, field)] = descriptor.fields_by_name.items()
    read, write = _converter(kind, field)
    return Converter(
        lambda wrapper: read(getattr(wrapper, name)),
        lambda items: message(**{name: write(items)}),
    )


def enum_converter(
    kind: type[Enum], descriptor: EnumDescriptor, *, has_none: bool = False
) -> Converter:
    """Return the conversion of an enum by its names, `has_none` if UNSPECIFIED stands for None."""
    unspecified = descriptor.values_by_number[0].name
    prefix = unspecified.removesuffix("UNSPECIFIED")
    number_by_value: dict[Enum | None, int] = {
        value: descriptor.values_by_name[f"{prefix}{value.name}"].number for value in kind
    }
    if has_none:
        number_by_value[None] = 0
    value_by_number = _ValueByNumber(descriptor.name)
    value_by_number.update({number: value for value, number in number_by_value.items()})
    return Converter(value_by_number.__getitem__, number_by_value.__getitem__)


class _ValueByNumber(dict[int, Enum | None]):
    """Values of an enum. Raises UnsupportedInput for other numbers, which a peer may send."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __missing__(self, number: int) -> Enum | None:
        raise UnsupportedInput(f"{self._name} {number} is unknown here")


def _has_none(hint: Any) -> bool:
    return NoneType in get_args(hint)


def _without_none(hint: Any) -> Any:
    """Return the type of a field, also of one that can be None."""
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    return kinds[0] if _has_none(hint) else hint
