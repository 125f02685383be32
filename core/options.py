"""Command-line options, declared at the fields of the config dataclasses that they set.

    @dataclass(frozen=True, slots=True)
    class TiersConfig:
        tenant_share: Annotated[
            float, Option("Share of a tier.", KV_CACHE, name="kv_tenant_share", above=0, at_most=1)
        ] = 1.0

        def __post_init__(self) -> None:
            check_options(self)

Commands take their options from these fields (`baton.cli.signatures`) and make the configs by
`build_config`. A field that holds another such config adds the options of that one. Parameters of a
command declare the options that no config has in the same way. Options that are settings
(`is_setting`) are read from files and the environment only, and are not in the help pages.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from typing import Any, TypeVar, get_args, get_type_hints

from baton.core.errors import InvalidConfig

# Panels of the help pages.
MODEL = "Model"
MACHINE = "Machine"
KV_CACHE = "KV cache"
BATCHING = "Batching"
ADAPTERS = "Adapters"
NETWORK = "Network"
ROUTING = "Routing"
SECURITY = "Security"
TELEMETRY = "Telemetry"
KV_EVENTS = "KV events"
KV_HINTS = "KV hints"
OUTPUT = "Output"

LIMITS = (("above", operator.gt), ("at least", operator.ge), ("at most", operator.le))

Config = TypeVar("Config")


@dataclass(frozen=True, slots=True)
class Option:
    """Command-line option. Limits and choices apply to the value as it is written."""

    help: str
    panel: str | None = None  # None: that of options without one
    name: str = ""  # with underscores; empty: the name of the field
    flags: tuple[str, ...] = ()  # empty: from the name, and --no-… for a truth value
    # On the command line; None: that of the field, or None if `parse` takes it.
    default: Any = None
    above: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    choices: tuple[str, ...] = ()  # besides the default
    # Makes the field's value from a written one of type `kind`; None: they are the same.
    parse: Callable[[Any], Any] | None = None
    kind: Any = str
    # Makes the field's value from the other options if this one is not given.
    default_from: Callable[[Mapping[str, Any]], Any] | None = None
    variable: str | None = None  # environment variable, in addition to that of the command
    is_setting: bool = False  # not on the command line


@dataclass(frozen=True, slots=True)
class OptionField:
    """Option, completed from the type and the default of its field."""

    option: Option
    field: str
    name: str
    kind: Any
    default: Any
    parse: Callable[[Any], Any] | None
    is_required: bool

    @property
    def flag(self) -> str:
        return f"--{_key(self.name)}"

    @property
    def title(self) -> str:
        """Return the name in messages."""
        return _title(self.name, self.option)

    def value_in(self, given: Mapping[str, Any]) -> Any:
        """Return the value of the field for the given options. Raises InvalidConfig."""
        value = given.get(self.name, self.default)
        if value is None and self.option.default_from is not None:
            return self.option.default_from(given)
        if self.parse is None:
            return value
        self.check(value)
        return self.parse(value)

    def check(self, value: Any) -> None:
        """Check limits and choices; None is allowed. Raises InvalidConfig."""
        option = self.option
        if value is None:
            return
        if option.choices and value not in (*option.choices, self.default):
            raise _unknown_choice(self.title, value, option.choices)
        bounds = (option.above, option.at_least, option.at_most)
        limits = [
            (words, fits, bound)
            for (words, fits), bound in zip(LIMITS, bounds, strict=True)
            if bound is not None
        ]
        if not all(fits(value, bound) for _, fits, bound in limits):
            expected = " and ".join(f"{words} {bound}" for words, _, bound in limits)
            raise InvalidConfig(f"{self.title} is {value}; it must be {expected}")


@cache
def options_of(config: type) -> Mapping[str, OptionField]:
    """Return the options of a config and of the configs that its fields hold, by name.

    Two fields may have the same option, such as --max-num-seqs.
    """
    options: dict[str, OptionField] = {}
    for part in _parts(config).values():
        more = {part.name: part} if isinstance(part, OptionField) else options_of(part)
        for name, option in more.items():
            options.setdefault(name, option)
    return options


def build_config(config: type[Config], given: Mapping[str, Any]) -> Config:
    """Make a config from written options; the others have their defaults. Raises InvalidConfig."""
    kind: Any = config  # for mypy, `type[Config]` is not hashable
    unknown = given.keys() - options_of(kind).keys()
    if unknown:
        raise TypeError(f"{config.__name__} has no options {', '.join(sorted(unknown))}")
    made: Config = _build(kind, given)
    return made


def check_options(config: object) -> None:
    """Check the fields of a config by the limits of their options. Raises InvalidConfig."""
    kind: Any = type(config)
    for name, part in _parts(kind).items():
        if isinstance(part, OptionField) and part.parse is None:
            part.check(getattr(config, name))


def _build(config: Any, given: Mapping[str, Any]) -> Any:
    values: dict[str, Any] = {}
    for name, part in _parts(config).items():
        if not isinstance(part, OptionField):
            values[name] = _build(part, given)
        elif part.name in given or not part.is_required:
            values[name] = part.value_in(given)
    return config(**values)


@cache
def _parts(config: type) -> Mapping[str, OptionField | type]:
    """Return the options of a config's fields, and the configs in them that have options."""
    names = vars(sys.modules[config.__module__])  # functions in annotations see them, too
    hints = get_type_hints(config, names, include_extras=True)
    parts: dict[str, OptionField | type] = {}
    for field in fields(config):
        kind, *notes = get_args(hints[field.name]) or (hints[field.name],)
        option = next((one for one in notes if isinstance(one, Option)), None)
        if option is not None:
            parts[field.name] = _option_field(field, kind, option)
        elif is_dataclass(kind) and isinstance(kind, type) and _parts(kind):
            parts[field.name] = kind
    return parts


def _option_field(field: Field[Any], kind: Any, option: Option) -> OptionField:
    name, parse, default = option.name or field.name, option.parse, option.default
    is_none_unless_given = parse is not None and type(None) in get_args(option.kind)
    if default is None and field.default is not MISSING and not is_none_unless_given:
        default = field.default
    if parse is not None:
        kind = option.kind
    elif isinstance(kind, type) and issubclass(kind, Enum):
        kind, parse = str, partial(_parse_choice, kind, _title(name, option))
        default = default.value if isinstance(default, Enum) else default
    if option.default_from is not None:
        kind, default = kind | None, None
    is_required = field.default is MISSING and field.default_factory is MISSING
    return OptionField(option, field.name, name, kind, default, parse, is_required)


def _parse_choice(kind: type[Enum], title: str, value: str) -> Enum:
    known = {choice.value: choice for choice in kind}
    if value not in known:
        raise _unknown_choice(title, value, known)
    return known[value]


def _unknown_choice(title: str, value: object, known: Iterable[str]) -> InvalidConfig:
    return InvalidConfig(f"{title} {value!r}: choose one of {', '.join(known)}")


def _title(name: str, option: Option) -> str:
    return _key(name) if option.is_setting else f"--{_key(name)}"


def _key(name: str) -> str:
    return name.replace("_", "-")
