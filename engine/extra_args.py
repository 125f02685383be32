"""What requests give logits processors, where there are none. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

from engine.errors import InvalidRequest
from engine.sampling import Argument, Scalar

FIELD = "extra_args"
MAX_ARGUMENT_ENTRIES = 1 << 12  # of a list; routers bound all lists of a request together
MAX_ARGUMENT_CHARACTERS = 1 << 16  # of a text
MOST_EXACT = 2**53  # up to here JSON's numbers are exact

Arguments = Mapping[str, Argument]
Check = Callable[[Arguments], None]


def argument_of(value: object) -> Argument:
    """What JSON holds, as far as it may be given. Raises InvalidRequest."""
    if isinstance(value, (list, tuple)):
        if len(value) > MAX_ARGUMENT_ENTRIES:
            raise InvalidRequest(
                f"a list has {len(value)} entries; at most {MAX_ARGUMENT_ENTRIES} may be", FIELD
            )
        return tuple(_scalar_of(one) for one in value)
    return _scalar_of(value)


def _scalar_of(value: object) -> Scalar:
    if isinstance(value, float) and value.is_integer() and abs(value) <= MOST_EXACT:
        return int(value)  # JSON knows one kind of number
    if isinstance(value, str) and len(value) > MAX_ARGUMENT_CHARACTERS:
        raise InvalidRequest(
            f"a text has {len(value)} characters; at most {MAX_ARGUMENT_CHARACTERS} may be", FIELD
        )
    is_number = isinstance(value, float) and math.isfinite(value)
    if isinstance(value, (str, int)) or is_number:
        return value  # type: ignore[return-value]  # it is one of these
    raise InvalidRequest(
        f"{value!r} is not taken: strings, finite numbers, booleans and lists of these are", FIELD
    )


def nobody_takes(argument: str, taken: Collection[str]) -> InvalidRequest:
    known = ", ".join(sorted(taken)) or "none"
    return InvalidRequest(f"no logits processor here takes {argument!r}; taken: {known}", FIELD)


def refuse_any(extra_args: Arguments) -> None:
    """Raises InvalidRequest."""
    for argument in extra_args:
        raise nobody_takes(argument, ())
