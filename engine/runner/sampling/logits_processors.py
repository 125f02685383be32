"""Custom logits processors: loaded by entry point, enabled by a request's `extra_args`.

A package registers a factory under the entry point group `baton.logits_processors`; a node loads
it by name (`--logits-processors`). Names and versions are part of the model's fingerprint, so that
only nodes with the same processors work together.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol

from torch import Tensor

from baton.core.errors import InvalidConfig, InvalidRequest
from baton.core.extra_args import FIELD, Arguments, unknown_argument
from baton.core.sampling import Argument
from baton.engine.runner.model.pass_layout import Ints

log = logging.getLogger(__name__)
GROUP = "baton.logits_processors"
NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class ModelView:
    """Model that a processor is made for."""

    folder: str
    vocab_size: int


class LogitsProcessor(Protocol):
    """Modifies the logits of requests that set at least one of its arguments.

    Its result must depend only on the arguments and on the tokens so far: a generation can move
    to another node, and steps can be repeated.
    """

    @property
    def arguments(self) -> frozenset[str]:
        """Names in a request's `extra_args` that belong to this processor."""
        ...

    def check(self, values: Arguments) -> None:
        """Raise ValueError with the reason if the arguments are invalid."""
        ...

    def apply(
        self, scores: Tensor, tokens: Ints, num_prompt_tokens: int, values: Arguments
    ) -> None:
        """Modify a row of logits in place; -inf forbids a token. `tokens`: prompt and outputs."""
        ...


class Processors:
    """Logits processors of one node, in the order of the command line."""

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
        """Raise InvalidRequest for an unknown argument, or one that its processor rejects."""
        for argument in extra_args:
            if argument not in self._name_by_argument:
                raise unknown_argument(argument, self._name_by_argument)
        for name, values in self._select(extra_args):
            try:
                self._by_name[name].check(values)
            except ValueError as error:
                raise InvalidRequest(f"{name}: {error}", FIELD) from error

    def apply(
        self, scores: Tensor, tokens: Ints, num_prompt_tokens: int, extra_args: Arguments
    ) -> str:
        """Apply the processors of a request; return the reason if one fails, else "".

        A failing processor ends only its own request. Tokens forbidden before stay forbidden.
        """
        selected = self._select(extra_args)
        forbidden = scores.isneginf() if selected else None
        for name, values in selected:
            try:
                self._by_name[name].apply(scores, tokens, num_prompt_tokens, values)
            except Exception as error:
                log.exception("logits processor %s failed", name)
                return f"logits processor {name} failed: {type(error).__name__}: {error}"
            if scores.isnan().any() or scores.isposinf().any():
                return f"logits processor {name} returned a logit that is NaN or +inf"
        if forbidden is not None:
            scores.masked_fill_(forbidden, NEVER)
        return ""

    def _select(self, extra_args: Arguments) -> list[tuple[str, Arguments]]:
        by_name: dict[str, dict[str, Argument]] = {}
        for argument, value in extra_args.items():
            by_name.setdefault(self._name_by_argument[argument], {})[argument] = value
        return [(name, by_name[name]) for name in self._by_name if name in by_name]


NO_PROCESSORS = Processors({})


def load_processors(names: Sequence[str], model: ModelView) -> Processors:
    """Load the processors with these names. Raises InvalidConfig."""
    return Processors({name: _load(entry, model) for name, entry in _find(names).items()})


def versions(names: Sequence[str]) -> list[str]:
    """Return the processors' versions, for the model's fingerprint. Raises InvalidConfig."""
    return [f"{name} {_version(entry)}" for name, entry in _find(names).items()]


def _find(names: Sequence[str]) -> dict[str, EntryPoint]:
    if not names:  # reading the entry points of all packages takes a while
        return {}
    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    for name in names:
        if name not in installed:
            known = ", ".join(sorted(installed)) or "none"
            raise InvalidConfig(
                f"--logits-processors {name}: no installed package has it under the entry point "
                f"group {GROUP}; installed: {known}"
            )
    return {name: installed[name] for name in names}


def _load(entry: EntryPoint, model: ModelView) -> LogitsProcessor:
    try:
        processor: LogitsProcessor = entry.load()(model)
    except Exception as error:
        raise InvalidConfig(
            f"--logits-processors {entry.name}: cannot load {entry.value}: "
            f"{type(error).__name__}: {error}"
        ) from error
    return processor


def _version(entry: EntryPoint) -> str:
    package = entry.dist
    return entry.value if package is None else f"{entry.value} {package.name} {package.version}"
