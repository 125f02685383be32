"""Logits processors that are not Baton's own: found by entry point, asked for by request.

A package names what makes one in the group `baton.logits_processors`; a node is started with
`--logits-processors` and the names. Which ones, and of which versions, is part of the model's
fingerprint: only nodes with the same ones work together.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol

from torch import Tensor

from engine.errors import InvalidConfig, InvalidRequest
from engine.extra_args import FIELD, Arguments, nobody_takes
from engine.runner.layout import Ints
from engine.sampling import Argument

log = logging.getLogger(__name__)
GROUP = "baton.logits_processors"
NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Model:
    """What a processor is made for."""

    folder: str
    vocab_size: int


class LogitsProcessor(Protocol):
    """Takes part in the choice of each token of the requests that give one of its arguments.

    What it does may depend on the arguments and on the tokens so far and on nothing else: an
    answer may begin on one node and go on at another, and steps may be repeated.
    """

    @property
    def arguments(self) -> frozenset[str]:
        """The names in a request's `extra_args` that are its own."""
        ...

    def check(self, given: Arguments) -> None:
        """Raises ValueError, which says what is wrong with them."""
        ...

    def apply(self, scores: Tensor, tokens: Ints, num_prompt_tokens: int, given: Arguments) -> None:
        """Change the row of logits in place; -inf forbids. `tokens`: prompt and answer so far."""
        ...


class Processors:
    """Those of one node, in the order in which they were named."""

    def __init__(self, by_name: Mapping[str, LogitsProcessor]) -> None:
        self._by_name = dict(by_name)
        self._name_by_argument: dict[str, str] = {}
        for name, processor in self._by_name.items():
            for argument in processor.arguments:
                other = self._name_by_argument.setdefault(argument, name)
                if other != name:
                    raise InvalidConfig(
                        f"logits processors {other} and {name} both take {argument!r}: "
                        "start the node with one of them"
                    )

    def check(self, extra_args: Arguments) -> None:
        """Raises InvalidRequest for what nobody takes, or whoever takes it refuses."""
        for argument in extra_args:
            if argument not in self._name_by_argument:
                raise nobody_takes(argument, self._name_by_argument)
        for name, given in self._asked(extra_args):
            try:
                self._by_name[name].check(given)
            except ValueError as error:
                raise InvalidRequest(f"{name}: {error}", FIELD) from error

    def apply(
        self, scores: Tensor, tokens: Ints, num_prompt_tokens: int, extra_args: Arguments
    ) -> str:
        """Why it could not be done, if so: one that fails ends its request and no other.

        What was forbidden before stays so.
        """
        asked = self._asked(extra_args)
        forbidden = scores.isneginf() if asked else None
        for name, given in asked:
            try:
                self._by_name[name].apply(scores, tokens, num_prompt_tokens, given)
            except Exception as error:
                log.exception("logits processor %s failed", name)
                return f"logits processor {name} failed: {type(error).__name__}: {error}"
            if scores.isnan().any() or scores.isposinf().any():
                return f"logits processor {name} gave a score that is no number, or endless"
        if forbidden is not None:
            scores.masked_fill_(forbidden, NEVER)
        return ""

    def _asked(self, extra_args: Arguments) -> list[tuple[str, Arguments]]:
        given: dict[str, dict[str, Argument]] = {}
        for argument, value in extra_args.items():
            given.setdefault(self._name_by_argument[argument], {})[argument] = value
        return [(name, given[name]) for name in self._by_name if name in given]


NO_PROCESSORS = Processors({})


def load_processors(names: Sequence[str], model: Model) -> Processors:
    """Raises InvalidConfig."""
    return Processors({name: _made(entry, model) for name, entry in _found(names).items()})


def versions(names: Sequence[str]) -> list[str]:
    """Tells apart nodes whose processors differ. Raises InvalidConfig."""
    return [f"{name} {_version(entry)}" for name, entry in _found(names).items()]


def _found(names: Sequence[str]) -> dict[str, EntryPoint]:
    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    for name in names:
        if name not in installed:
            known = ", ".join(sorted(installed)) or "none"
            raise InvalidConfig(
                f"--logits-processors {name}: no installed package has it under the entry point "
                f"group {GROUP}; installed: {known}"
            )
    return {name: installed[name] for name in names}


def _made(entry: EntryPoint, model: Model) -> LogitsProcessor:
    try:
        made: LogitsProcessor = entry.load()(model)
    except Exception as error:
        raise InvalidConfig(
            f"--logits-processors {entry.name}: {entry.value} cannot be made: "
            f"{type(error).__name__}: {error}"
        ) from error
    return made


def _version(entry: EntryPoint) -> str:
    package = entry.dist
    return entry.value if package is None else f"{entry.value} {package.name} {package.version}"
