"""Options that are written once: a command takes what other functions take, and passes it on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from typing import Any

import typer

Command = Callable[..., Any]


def options_of(function: Command) -> list[inspect.Parameter]:
    """Its parameters with their types looked up, so that another function can have them.

    Its return type is left alone: it may be a name that only type checkers import.
    """
    names = function.__globals__
    return [
        one.replace(annotation=eval(one.annotation, names))
        if isinstance(one.annotation, str)
        else one
        for one in inspect.signature(function).parameters.values()
    ]


def takes_options_of(
    *others: Command, without: Collection[str] = ()
) -> Callable[[Command], Command]:
    """The function's own parameters, then those of the others; it gets these by `**name`."""

    def dress(function: Command) -> Command:
        own = [one for one in options_of(function) if one.kind is not one.VAR_KEYWORD]
        taken = {one.name: one for one in own}
        for one in (one for other in others for one in options_of(other)):
            if one.name not in without:
                taken.setdefault(one.name, one)
        ordered = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in taken.values()]
        function.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
        function.__annotations__ = {}  # the signature has them all
        return function

    return dress


def passed_on(
    context: typer.Context, taker: Command, *, without: Collection[str] = ()
) -> tuple[str, ...]:
    """The options that a person chose and that `taker` takes, too, as command-line arguments."""
    names = {one.name for one in options_of(taker)} - set(without)
    return tuple(
        argument
        for option in context.command.params
        if option.name in names and is_chosen(context, option.name)
        for argument in _spelled(option, context.params[option.name])
    )


def is_chosen(context: typer.Context, name: str) -> bool:
    """By a flag, the environment or a file; else it has its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _spelled(option: Any, value: object) -> Iterator[str]:
    if isinstance(value, bool):
        yield option.opts[0] if value else option.secondary_opts[0]
        return
    for one in value if isinstance(value, list | tuple) else [value]:
        yield f"{option.opts[0]}={one}"


def split(given: dict[str, Any], *takers: Command) -> list[dict[str, Any]]:
    """To each what it takes."""
    wanted = [{one.name for one in options_of(taker)} for taker in takers]
    return [{name: value for name, value in given.items() if name in names} for names in wanted]
