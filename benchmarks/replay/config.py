"""Settings of `python -m benchmarks replay`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from baton.core.options import Option, check_options

TRACE = "Trace"


@dataclass(frozen=True, slots=True)
class ReplayBench:
    """Settings of a replay of a trace."""

    time_scale: Annotated[
        float,
        Option("Factor of all times: 0.1 is ten times as fast; 0: all at once.", TRACE, at_least=0),
    ] = 1.0
    block_tokens: Annotated[
        int | None,
        Option(
            "Tokens that replay a block of the trace (512 tokens in Mooncake, 64 in Weka); all "
            "lengths are scaled alike. Default: lengths as recorded.",
            TRACE,
            at_least=1,
        ),
    ] = None
    max_output_tokens: Annotated[int | None, Option("Longest answer.", TRACE, at_least=1)] = None
    use_answers: Annotated[
        bool,
        Option(
            "Continue sessions with the model's answers, instead of the recorded ones.",
            TRACE,
            flags=("--use-answers",),
        ),
    ] = False
    max_in_flight: Annotated[
        int,
        Option(
            "Maximum requests in flight; waiting for a slot counts as latency.", TRACE, at_least=1
        ),
    ] = 1000
    block_size: Annotated[
        int,
        Option(
            "Tokens per KV block of the nodes; the ideal reuse is in such blocks.",
            TRACE,
            at_least=1,
        ),
    ] = 16
    seed: Annotated[int, Option("Seed of the token ids.", TRACE)] = 0

    def __post_init__(self) -> None:
        check_options(self)
