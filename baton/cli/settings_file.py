"""Settings file: TOML with a table per command, validated against the commands' options."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from baton.core.errors import InvalidConfig

DefaultMap = dict[str, object]  # values by option for a command; such maps by name for a group


@dataclass(frozen=True, slots=True)
class FileOption:
    """Option that a file may set."""

    name: str  # with underscores
    kind: type  # bool, int, float, or str for any other type
    takes_several: bool = False


@dataclass(frozen=True, slots=True)
class CommandOptions:
    options: Mapping[str, FileOption]


@dataclass(frozen=True, slots=True)
class GroupOptions:
    commands: Mapping[str, Node]


Node = CommandOptions | GroupOptions

KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def read_settings(path: Path, commands: Node) -> DefaultMap:
    """Return the file's values by command. Raises InvalidConfig with the file and the key."""
    try:
        parsed = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InvalidConfig(f"{path} cannot be read: {reason}") from error
    except tomllib.TOMLDecodeError as error:
        raise InvalidConfig(f"{path} is not TOML: {error}") from error
    return _settings(parsed, commands, {}, _SettingPlace(path))


@dataclass(frozen=True, slots=True)
class _SettingPlace:
    """Position in the file, for error messages."""

    path: Path
    tables: tuple[str, ...] = ()

    def below(self, name: str) -> _SettingPlace:
        return _SettingPlace(self.path, (*self.tables, name))

    def wrong(self, message: str) -> InvalidConfig:
        table = f" [{'.'.join(self.tables)}]" if self.tables else ""
        return InvalidConfig(f"{self.path}{table}: {message}")

    def unknown(self, what: str, name: str, known: Iterable[str]) -> InvalidConfig:
        known = sorted(known)
        near = get_close_matches(name, known, n=3, cutoff=0.5)
        advice = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
        return self.wrong(f"unknown {what} {name!r}; {advice}")


def _settings(
    table: Mapping[str, object], node: Node, above: Mapping[str, object], place: _SettingPlace
) -> DefaultMap:
    """Apply each key to every command below its table that has such an option."""
    values = {
        key.replace("-", "_"): value for key, value in table.items() if not isinstance(value, dict)
    }
    tables = {key: value for key, value in table.items() if isinstance(value, dict)}
    options = _options_below(node)
    for name in values:
        if name not in options:
            raise place.unknown("key", name, options)
    inherited = {**above, **values}
    commands = node.commands if isinstance(node, GroupOptions) else {}
    for name in tables:
        if name not in commands:
            raise place.unknown("table", name, commands)
    if isinstance(node, CommandOptions):
        own = {name: value for name, value in inherited.items() if name in node.options}
        return {name: _check_value(node.options[name], own[name], place) for name in own}
    return {
        name: _settings(tables.get(name, {}), below, inherited, place.below(name))
        for name, below in node.commands.items()
    }


def _options_below(node: Node) -> set[str]:
    if isinstance(node, CommandOptions):
        return set(node.options)
    return {name for below in node.commands.values() for name in _options_below(below)}


def _check_value(option: FileOption, value: object, place: _SettingPlace) -> object:
    """Accept lists for repeatable options and for options with comma-separated text."""
    if isinstance(value, list):
        if not (option.takes_several or option.kind is str):
            raise place.wrong(f"{option.name} is a list; it must be {KINDS[option.kind]}")
        several = [_single(option, one, place) for one in value]
        return several if option.takes_several else ",".join(map(str, several))
    single = _single(option, value, place)
    return [single] if option.takes_several else single


def _single(option: FileOption, value: object, place: _SettingPlace) -> object:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = {
        bool: isinstance(value, bool),
        int: is_number and isinstance(value, int),
        float: is_number,
        str: is_number or isinstance(value, str),
    }
    if not fits[option.kind]:
        raise place.wrong(f"{option.name} is {value!r}; it must be {KINDS[option.kind]}")
    return str(value) if option.kind is str else value
