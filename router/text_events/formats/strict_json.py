"""JSON that models write, as values that are JSON again. Pure."""

from __future__ import annotations

import json
import re
from decimal import Decimal, InvalidOperation
from math import isfinite
from typing import Any, NoReturn

MAX_DIGITS = 4000  # of all integers that a text gets in place of exponents; Python refuses 4,300
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def strict_loads(text: str) -> Any:
    """Parse JSON without NaN, infinities and lone surrogates. Raises ValueError.

    Numbers beyond doubles, such as 1e999, become integers.
    """
    value = json.loads(text, parse_constant=_refuse, parse_float=_Numbers().read)
    text.encode()  # raises for a lone surrogate
    if _SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode()  # likewise
    return value


def has_only_finite_numbers(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


class _Numbers:
    """Reads the numbers of one text."""

    def __init__(self) -> None:
        self._num_digits_left = MAX_DIGITS

    def read(self, text: str) -> float | int:
        number = float(text)
        if isfinite(number):
            return number
        try:
            exact = Decimal(text)
        except InvalidOperation:  # an exponent of 19 digits
            raise ValueError(f"{text} is too large") from None
        self._num_digits_left -= exact.adjusted()
        if self._num_digits_left <= 0:
            raise ValueError(f"{text} is too large")
        return int(exact)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
