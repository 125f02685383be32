"""Start-up benchmark: from the start of a program to its first token.

The programs start in turns, once unmeasured, which fills the caches of files and packed weights.
"""

from __future__ import annotations

import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.completions_api import CompletionsApi, EngineFailed, random_prompt
from benchmarks.peers.settings import clean_environment, python_of
from benchmarks.processes import cpu_s_of_tree, external_process, free_port

PROMPT, PROMPT_TOKENS = "The capital of France is", 5
SERVES = re.compile(r"(http://\S+)/v1; ")  # in the announcement of `baton up`
WORKER = Path(__file__).parent / "workers" / "llamacpp_first_token.py"


@dataclass(frozen=True, slots=True)
class Program:
    """Command that prints its first token, or an announcement of its HTTP server."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MeasuredStart:
    """Time to the first token, and CPU time of the process and its descendants until then."""

    program: str
    first_token_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class StartupFigure:
    """Medians over the rounds. A ratio is to the first program, in the same round."""

    program: str
    first_token_s: float
    ratio: float
    cpu_s: float
    cpu_ratio: float


def programs(model: Path, llamacpp_venv: Path | None) -> list[Program]:
    """Return llama-cpp-python, if there is one, `baton run` and `baton up`."""
    baton, path = (sys.executable, "-m", "baton"), str(model.absolute())
    http_port = str(free_port())
    found = [
        Program("baton run", (*baton, "run", PROMPT, "--model", path, "--max-tokens", "1")),
        Program("baton up", (*baton, "up", "--model", path, "--port=0", "--http-port", http_port)),
    ]
    if llamacpp_venv is None:
        return found
    return [
        Program("llama.cpp", (str(python_of(llamacpp_venv)), str(WORKER), path, PROMPT)),
        *found,
    ]


def run(
    programs: Sequence[Program], num_rounds: int, on_start: Callable[[MeasuredStart], None]
) -> None:
    """Start the programs in turns; `on_start` is called with each start. Raises EngineFailed."""
    for number in range(num_rounds + 1):
        for program in programs:
            start = _start(program)
            if number:
                on_start(start)


def figures(starts: Sequence[MeasuredStart]) -> list[StartupFigure]:
    """Return a figure of each program. The last round may be incomplete."""
    by_program: dict[str, list[MeasuredStart]] = {}
    for start in starts:
        by_program.setdefault(start.program, []).append(start)
    first = by_program[starts[0].program]
    return [_figure(own, first) for own in by_program.values()]


def _figure(own: Sequence[MeasuredStart], first: Sequence[MeasuredStart]) -> StartupFigure:
    pairs = list(zip(own, first, strict=False))
    return StartupFigure(
        own[0].program,
        first_token_s=statistics.median(one.first_token_s for one in own),
        ratio=statistics.median(one.first_token_s / other.first_token_s for one, other in pairs),
        cpu_s=statistics.median(one.cpu_s for one in own),
        cpu_ratio=statistics.median(one.cpu_s / other.cpu_s for one, other in pairs),
    )


def _start(program: Program) -> MeasuredStart:
    began_s = time.monotonic()
    with external_process(
        program.command, clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        if not _await_token(process.stdout or ()):
            raise EngineFailed(f"{' '.join(program.command)} ended with code {process.wait()}")
        start = MeasuredStart(program.name, time.monotonic() - began_s, cpu_s_of_tree(process.pid))
        process.send_signal(signal.SIGINT)
        process.communicate()
    return start


def _await_token(lines: Iterable[str]) -> bool:
    """Wait for a line, and for a token where it announces a server. Return False at the end."""
    for line in lines:
        serves = SERVES.search(line)
        if serves is not None:
            api = CompletionsApi(serves[1])
            prompt = random_prompt(random.Random(0), PROMPT_TOKENS)
            api.stream(api.model().name, prompt, 1)
        return True
    return False
