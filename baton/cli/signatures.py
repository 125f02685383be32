"""Shared options: commands take over those of configs and the parameters of other functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from functools import cache
from typing import Annotated, Any, TypeVar, get_args

import typer

from baton.core.options import Option, build_config, options_of

Command = Callable[..., Any]  # or the class of a config
Function = TypeVar("Function", bound=Callable[..., Any])


def option_of(config: type, name: str) -> Any:
    """Return an option of a config, for a command that takes only some of them."""
    return options_of(config)[name].option


def parameters_of(source: Command) -> list[inspect.Parameter]:
    """Return the options of a config or the parameters of a function, for use in a signature."""
    if isinstance(source, type):
        return _parameters_of_config(source)
    return _parameters_of_function(source)


@cache
def _parameters_of_config(config: type) -> list[inspect.Parameter]:
    return [
        inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if one.is_required else one.default,
            annotation=Annotated[one.kind, _typer_option(one.option)],
        )
        for one in options_of(config).values()
    ]


def _parameters_of_function(function: Command) -> list[inspect.Parameter]:
    """Return the parameters with resolved annotations.

    The return annotation is not resolved: it may be a name imported only for type checking.
    """
    names = function.__globals__
    return [
        one.replace(annotation=_for_typer(eval(one.annotation, names)))
        if isinstance(one.annotation, str)
        else one
        for one in inspect.signature(function).parameters.values()
    ]


def _for_typer(annotation: Any) -> Any:
    kind, *notes = get_args(annotation) or (annotation,)
    if not notes or not isinstance(notes[0], Option):
        return annotation
    return Annotated[kind, _typer_option(notes[0])]


def _typer_option(option: Option) -> Any:
    shows_range = option.above is None  # typer has no ranges without their lower end
    return typer.Option(
        *option.flags,
        help=option.help,
        rich_help_panel=option.panel,
        min=option.at_least,
        max=option.at_most if shows_range else None,
        envvar=option.variable,
        hidden=option.is_setting,
    )


def inherit_options(
    *others: Command, without: Collection[str] = ()
) -> Callable[[Function], Function]:
    """Add the options of `others` to the function's signature; it gets them by `**name`.

    Without `others`, make the function's own options known to typer.
    """

    def decorate(function: Function) -> Function:
        own = [one for one in parameters_of(function) if one.kind is not one.VAR_KEYWORD]
        taken = {one.name: one for one in own}
        for one in (one for other in others for one in parameters_of(other)):
            if one.name not in without:
                taken.setdefault(one.name, one)
        ordered = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in taken.values()]
        function.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
        function.__annotations__ = {}  # the signature has them all
        return function

    return decorate


def forwarded_arguments(
    context: typer.Context, taker: Command, *, without: Collection[str] = ()
) -> tuple[str, ...]:
    """Return the explicitly set options that `taker` also has, as command-line arguments."""
    names = {one.name for one in parameters_of(taker)} - set(without)
    return tuple(
        argument
        for option in context.command.params
        if option.name in names and is_set(context, option.name)
        for argument in _arguments(option, context.params[option.name])
    )


def is_set(context: typer.Context, name: str) -> bool:
    """Return whether a flag, the environment or a file set the option."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _arguments(option: Any, value: object) -> Iterator[str]:
    if isinstance(value, bool):
        yield option.opts[0] if value else option.secondary_opts[0]
        return
    for one in value if isinstance(value, list | tuple) else [value]:
        yield f"{option.opts[0]}={one}"


def make(source: Command, given: dict[str, Any]) -> Any:
    """Make the config, or call the function, with its own options among those `given`."""
    names = {one.name for one in parameters_of(source)}
    own = {name: value for name, value in given.items() if name in names}
    return build_config(source, own) if isinstance(source, type) else source(**own)
