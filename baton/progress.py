"""Progress bars on standard error. Only those that are shown import rich."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from baton.engine.runner.model_info import LoadProgress


@contextmanager
def loading_bar(is_shown: bool) -> Iterator[Callable[[LoadProgress], None] | None]:
    if not is_shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn("loading weights"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda load: bar.update(task, completed=load.loaded_bytes, total=load.total_bytes)


@contextmanager
def generation_bar(num_prompts: int, is_shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that adds numbers of ended prompts and new tokens to the bar."""
    if not is_shown:
        yield lambda _num_ended, _num_tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("prompts"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} · {task.fields[num_tokens]} tokens"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=num_prompts, num_tokens=0)
        total = 0

        def advance(num_ended: int, num_tokens: int) -> None:
            nonlocal total
            total += num_tokens
            bar.update(task, advance=num_ended, num_tokens=total)

        yield advance
