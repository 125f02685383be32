"""Features of every command: settings file, environment variables, examples."""

from __future__ import annotations

import inspect
import os
import sys
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from baton.cli.examples import examples_of
from baton.cli.help_page import show_help_all, write_commands, write_options
from baton.cli.settings_file import CommandOptions, FileOption, GroupOptions, Node, read_settings
from baton.cli.show import show_table
from baton.cli.signatures import inherit_options
from baton.core.errors import InvalidConfig

SETTINGS_PANEL = "Settings"
ENVIRONMENT_PREFIX = "BATON"
SHOW = "baton.show_config"
FILE = "baton.config"
DEFAULT_COMMAND = "show"
SETTINGS = "baton.settings"
PARENT = "parent_pid"  # of a process that another one starts, and passes settings to
SECRET_ENDINGS = ("token", "password")


def load_settings(context: typer.Context, config: Path | None) -> Path | None:
    """Load the settings file before the other options are parsed, as their default values."""
    if config is not None and not context.resilient_parsing:
        settings: Any = read_settings(config, _options_of(context.find_root().command))
        context.meta[SETTINGS] = settings
        for name in _path(context):
            settings = settings[name]
        context.default_map = settings
        context.meta[FILE] = config
    if not context.resilient_parsing:
        _warn_of_unknown_variables(context)
    return config


def set_show_config(context: typer.Context, show_config: bool) -> bool:
    context.meta[SHOW] = show_config
    return show_config


HelpAll = Annotated[
    bool,
    typer.Option(
        "--help-all",
        help="Show all options and exit.",
        callback=show_help_all,
        is_eager=True,
        hidden=True,  # in the last line of the pages that do not show all of them
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="TOML settings file with a table per command.",
        callback=load_settings,
        is_eager=True,
        rich_help_panel=SETTINGS_PANEL,
    ),
]
ShowConfig = Annotated[
    bool,
    typer.Option(
        "--show-config",
        help="Print each option with its value and the source of it, then exit.",
        callback=set_show_config,
        rich_help_panel=SETTINGS_PANEL,
    ),
]


def _of_every_command(
    config: ConfigFile = None, show_config: ShowConfig = False, help_all: HelpAll = False
) -> None:
    """Signature from which the options of every command are made."""


@cache
def _options_of_every_command() -> list[Any]:
    app = typer.Typer(add_completion=False)
    app.command()(_of_every_command)
    options = list(typer.main.get_command(app).params)
    for option in options:
        option.expose_value = False
    return options


class Command(TyperCommand):
    """Command that also reads its options from a settings file and the environment."""

    def __init__(self, *args: Any, params: list[Any] | None = None, **given: Any) -> None:
        super().__init__(*args, params=[*(params or ()), *_options_of_every_command()], **given)
        self.help = unwrap(self.help or "")
        hide_variables(self)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest: list[str] = super().parse_args(ctx, args)
        if not ctx.resilient_parsing and not ctx.params.get(PARENT):
            _refuse_settings(ctx)
        return rest

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_options(ctx, formatter, " ".join(_path(ctx)))

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if self.epilog:
            formatter.write(f"\n{self.epilog}\n")  # a wrapped command line cannot be copied

    def invoke(self, ctx: Any) -> Any:
        if ctx.meta.get(SHOW):
            _show_settings(ctx)
            return None
        return super().invoke(ctx)


class CommandGroup(TyperGroup):
    """Group whose help page has whole summaries and examples."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_options(ctx, formatter, "")
        write_commands(ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if self.epilog:
            formatter.write(f"\n{self.epilog}\n")  # a wrapped command line cannot be copied


class DefaultGroup(CommandGroup):
    """Group whose command `show` runs when none is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args = [DEFAULT_COMMAND, *args]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


def use_command_class(app: typer.Typer, groups: tuple[str, ...] = ()) -> None:
    """Turn every command of the app and its groups into a `Command` with examples."""
    app.rich_markup_mode = None  # help pages are plain text: 'baton[s3]' is not markup
    for command in app.registered_commands:
        name = command.name or getattr(command.callback, "__name__", "").replace("_", "-")
        if not issubclass(command.cls or TyperCommand, Command):
            command.cls = Command
        command.callback = inherit_options()(command.callback) if command.callback else None
        command.epilog = command.epilog or examples_of(" ".join([*groups, name]))
    for group in app.registered_groups:
        if group.typer_instance is not None and isinstance(group.name, str):
            use_command_class(group.typer_instance, (*groups, group.name))


def unwrap(text: str) -> str:
    """Join each paragraph into one line, so that the terminal decides where to wrap."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(" ".join(one.split()) for one in paragraphs)


def hide_variables(command: Any) -> None:
    """Hide variable names in the option help: `baton --help` states their naming rule once."""
    for param in command.params:
        if hasattr(param, "show_envvar"):
            param.show_envvar = False


def _path(context: typer.Context) -> list[str]:
    """Return the names of groups and command, without the program name."""
    names: list[str] = []
    at: Any = context
    while at.parent is not None:
        names.insert(0, at.info_name)
        at = at.parent
    return names


def _options_of(command: Any) -> Node:
    if hasattr(command, "commands"):
        return GroupOptions({name: _options_of(one) for name, one in command.commands.items()})
    own = [one for one in command.params if one.param_type_name == "option" and _is_own(one)]
    return CommandOptions({option.name: option for option in map(_option, own)})


def _is_own(param: Any) -> bool:
    return bool(param.expose_value) and not param.is_eager


def _refuse_settings(context: Any) -> None:
    """Refuse settings on the command line. Raises InvalidConfig."""
    for param in context.command.params:
        source = context.get_parameter_source(param.name)
        is_setting = param.param_type_name == "option" and _is_own(param) and param.hidden
        if is_setting and source is not None and source.name == "COMMANDLINE":
            key, table = param.name.replace("_", "-"), ".".join(_path(context))
            raise InvalidConfig(
                f"{key} is not an option of the command line: set it in a file (--config FILE), "
                f"as {key} = … below [{table}], or as {_variable(context, param.name)}"
            )


def _option(param: Any) -> FileOption:
    annotation = param.type_descriptor.annotation
    several = bool(param.multiple)
    kind = annotation.__args__[0] if several else annotation
    return FileOption(param.name, kind if kind in (bool, int, float) else str, several)


def _variable(context: Any, name: str) -> str:
    return f"{context.auto_envvar_prefix}_{name}".upper()


def _warn_of_unknown_variables(context: Any) -> None:
    """Check the running command only: a group's prefix may also begin other variables."""
    if hasattr(context.command, "commands") or context.auto_envvar_prefix is None:
        return
    known = {_variable(context, param.name) for param in context.command.params}
    for name in sorted(os.environ):
        if name.startswith(f"{context.auto_envvar_prefix}_") and name not in known:
            near = " or ".join(get_close_matches(name, known, n=2))
            advice = f"did you mean {near}?" if near else "see --show-config"
            print(f"baton: warning: {name} sets nothing; {advice}", file=sys.stderr)


def _show_settings(context: Any) -> None:
    params = [param for param in context.command.params if _is_own(param)]
    rows = [
        {"option": param.name, "value": _shown(param, context), "from": _source(param, context)}
        for param in params
    ]
    show_table(f"settings of {context.command_path}", rows)


def _shown(param: Any, context: Any) -> str:
    value = context.params.get(param.name)
    if value and param.name.endswith(SECRET_ENDINGS):
        return "(not shown)"
    return "" if value is None else str(value)


def _source(param: Any, context: Any) -> str:
    source = context.get_parameter_source(param.name)
    return {
        "COMMANDLINE": "command line",
        "ENVIRONMENT": _variable(context, param.name),
        "DEFAULT_MAP": str(context.meta.get(FILE)),
    }.get(source.name if source else "", "default")


def origin(context: Any, param: Any) -> str | None:
    """Return the file or variable that set a bad value; None for the command line."""
    if context is None or param is None:
        return None
    source = _source(param, context)
    return source if source not in ("command line", "default") else None
