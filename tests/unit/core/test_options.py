"""Options that config dataclasses declare at their fields."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

import pytest

from baton.core.errors import InvalidConfig
from baton.core.options import Option, build_config, check_options, options_of
from baton.core.units import parse_bytes

PANEL = "Panel"
Size = Annotated[int, Option("Number of requests.", PANEL, at_least=1)]


class Order(Enum):
    FIRST = "first"
    LAST = "last"


def default_limit(given: Mapping[str, Any]) -> int:
    return 2 * int(given.get("size", 4))


@dataclass(frozen=True, slots=True)
class Inner:
    size: Size = 4
    memory_bytes: Annotated[
        int, Option("Memory.", PANEL, name="memory", default="1KiB", parse=parse_bytes)
    ] = 0
    order: Annotated[Order, Option("Order.", PANEL)] = Order.FIRST
    limit: Annotated[int, Option("Limit.", PANEL, default_from=default_limit)] = 0
    is_internal: bool = False

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class Outer:
    path: Annotated[str, Option("Path.", PANEL)]
    inner: Inner = field(default_factory=Inner)
    size: Size = 4
    share: Annotated[float | None, Option("Share.", PANEL, above=0, at_most=1)] = 1.0
    color: Annotated[str, Option("Color.", PANEL, choices=("red", "blue"))] = "red"

    def __post_init__(self) -> None:
        check_options(self)


def test_a_config_has_each_option_of_its_nested_configs_once() -> None:
    options = options_of(Outer)

    assert list(options) == ["path", "size", "memory", "order", "limit", "share", "color"]
    assert [name for name, option in options.items() if option.is_required] == ["path"]
    assert (options["memory"].kind, options["memory"].default) == (str, "1KiB")
    assert (options["order"].kind, options["order"].default) == (str, "first")
    assert options["limit"].default is None


def test_config_defaults_equal_the_defaults_of_the_command_line() -> None:
    assert build_config(Outer, {"path": "p"}) == Outer("p", Inner(4, 1024, limit=8))


def test_an_option_sets_every_field_that_has_it() -> None:
    config = build_config(
        Outer, {"path": "p", "size": 3, "memory": "2KiB", "order": "last", "share": None}
    )

    assert config == Outer("p", Inner(3, 2048, Order.LAST, limit=6), size=3, share=None)


def test_a_default_from_other_options_does_not_replace_a_given_value() -> None:
    assert build_config(Inner, {"limit": 1}).limit == 1
    assert build_config(Inner, {"limit": None}).limit == 8


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": 0}, "--size is 0; it must be at least 1"),
        ({"share": 0.0}, "--share is 0.0; it must be above 0 and at most 1"),
        ({"share": 1.5}, "--share is 1.5; it must be above 0 and at most 1"),
        ({"share": math.nan}, "--share is nan; it must be above 0 and at most 1"),
        ({"color": "green"}, "--color 'green': choose one of red, blue"),
        ({"order": "random"}, "--order 'random': choose one of first, last"),
    ],
)
def test_an_out_of_range_value_is_refused_with_the_name_of_its_option(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidConfig) as refusal:
        build_config(Outer, {"path": "p", **given})

    assert str(refusal.value) == message


def test_a_config_built_in_python_is_validated_like_the_command_line() -> None:
    with pytest.raises(InvalidConfig, match="--share is 2; it must be above 0"):
        Outer("p", share=2)


def test_an_option_without_a_config_field_raises() -> None:
    with pytest.raises(TypeError, match="Outer has no options is_internal"):
        build_config(Outer, {"path": "p", "is_internal": True})
