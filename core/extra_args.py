"""Validation of extra arguments for logits processors. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

from baton.core.errors import InvalidRequest
from baton.core.sampling import Argument, Scalar

FIELD = "extra_args"
MAX_ARGUMENT_ENTRIES = 1 << 12  # per list; routers bound all lists of a request together
MAX_ARGUMENT_CHARACTERS = 1 << 16  # per string
MAX_EXACT_INTEGER = 2**53  # JSON numbers are exact up to here

Arguments = Mapping[str, Argument]
Check = Callable[[Arguments], None]


def parse_argument(value: object) -> Argument:
    """Convert a JSON value to an argument. Raises InvalidRequest if it is not allowed."""
    if isinstance(value, (list, tuple)):
        if len(value) > MAX_ARGUMENT_ENTRIES:
            raise InvalidRequest(
                f"a list has {len(value)} entries; at most {MAX_ARGUMENT_ENTRIES} are allowed",
                FIELD,
            )
        return tuple(_scalar_of(entry) for entry in value)
    return _scalar_of(value)


def _scalar_of(value: object) -> Scalar:
    if isinstance(value, float) and value.is_integer() and abs(value) <= MAX_EXACT_INTEGER:
        return int(value)  # JSON does not distinguish integers from floats
    if isinstance(value, str) and len(value) > MAX_ARGUMENT_CHARACTERS:
        raise InvalidRequest(
            f"a text has {len(value)} characters; at most {MAX_ARGUMENT_CHARACTERS} are allowed",
            FIELD,
        )
    is_number = isinstance(value, float) and math.isfinite(value)
    if isinstance(value, (str, int)) or is_number:
        return value  # type: ignore[return-value]  # it is one of these
    raise InvalidRequest(
        f"{value!r} is not allowed: use strings, finite numbers, booleans or lists of these", FIELD
    )


def unknown_argument(argument: str, taken: Collection[str]) -> InvalidRequest:
    """Return the error for an argument that no logits processor accepts."""
    known = ", ".join(sorted(taken)) or "none"
    return InvalidRequest(f"no logits processor here takes {argument!r}; taken: {known}", FIELD)


def reject_extra_args(extra_args: Arguments) -> None:
    """Raise InvalidRequest if there are any extra arguments."""
    for argument in extra_args:
        raise unknown_argument(argument, ())
