"""Build of missing native kernels before a model is loaded, with its progress shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from baton.checkpoint.checkpoint import Checkpoint
from baton.core.errors import ModelError
from baton.engine.runner.config import RunnerConfig, fits_kernels
from baton.engine.runner.kernels.build import (
    KernelsUnavailable,
    Report,
    best_variant,
    built,
    cpu_features,
    library,
)
from baton.engine.runner.open_runner import read_any_config

if TYPE_CHECKING:
    from rich.console import Console


def build_missing_kernels(
    config: RunnerConfig, checkpoint: Checkpoint, open_screen: Callable[[], Console]
) -> None:
    """Build the kernels that the model needs, if they were not built yet, and show that.

    What is wrong with the model or the compiler is left to be reported by the load of the model.
    """
    with suppress(ModelError, KernelsUnavailable):
        if not fits_kernels(config, read_any_config(checkpoint)):
            return
        variant = best_variant(cpu_features())
        if built(variant) is None:
            with _reporting(open_screen()) as report:
                library(variant, report)


@contextmanager
def _reporting(screen: Console) -> Iterator[Report]:
    """Show progress in a status line; without a terminal, only that a build or a wait begins."""
    if screen.is_terminal:
        with screen.status("") as status:
            yield status.update
        return
    seen: set[str] = set()

    def print_begin(message: str) -> None:
        begin = message.partition(":")[0]
        if begin not in seen:
            screen.print(begin, highlight=False)
        seen.add(begin)

    yield print_begin
