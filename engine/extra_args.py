"""What requests give logits processors, where there are none. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

from engine.errors import InvalidRequest
from engine.sampling import Argument, Scalar

FIELD = "extra_args"
MOST_EXACT = 2**53  # up to here JSON's numbers are exact

Arguments = Mapping[str, Argument]
Check = Callable[[Arguments], None]


def argument_of(value: object) -> Argument:
    """What JSON holds, as far as it may be given. Raises InvalidRequest."""
    if isinstance(value, (list, tuple)):
        return tuple(_scalar_of(one) for one in value)
    return _scalar_of(value)


def _scalar_of(value: object) -> Scalar:
    if isinstance(value, float) and value.is_integer() and abs(value) <= MOST_EXACT:
        return int(value)  # JSON knows one kind of number
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
