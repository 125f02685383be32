"""Options of the scheduler's batches."""

from __future__ import annotations

from typing import Annotated

import typer

BATCH_PANEL = "Batching"

LogitsProcessors = Annotated[
    str,
    typer.Option(
        help="Comma-separated names of installed logits processors; the same on every node.",
        rich_help_panel=BATCH_PANEL,
    ),
]
Speculative = Annotated[
    str,
    typer.Option(
        help="Speculative decoding. ngram:K: propose up to K tokens by n-gram lookup in the "
        "request's own text and verify them in one step; the output does not change.",
        rich_help_panel=BATCH_PANEL,
    ),
]
MaxNumSeqs = Annotated[
    int, typer.Option(help="Maximum number of requests in a batch.", rich_help_panel=BATCH_PANEL)
]
MaxTokens = Annotated[
    int, typer.Option(help="Maximum number of tokens in a step.", rich_help_panel=BATCH_PANEL)
]
SchedulingPolicy = Annotated[
    str,
    typer.Option(
        help="Order of waiting requests: priority or fcfs. priority orders by the request's "
        "priority (lower first), then by arrival; a waiting request may preempt running ones of "
        "lower priority, each at most once. fcfs orders by arrival alone.",
        rich_help_panel=BATCH_PANEL,
    ),
]
LongPrefill = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Maximum tokens of one prompt in a step while short prompts arrive, so that they are "
        "not delayed by long ones; 0: no limit. Default: 512, or 0 with --no-chunked-prefill.",
        rich_help_panel=BATCH_PANEL,
    ),
]
MaxPartialPrefills = Annotated[
    int,
    typer.Option(
        min=0,
        help="Maximum number of partially computed prompts; 0: no limit.",
        rich_help_panel=BATCH_PANEL,
    ),
]
MaxLongPartialPrefills = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Maximum number of partially computed prompts longer than "
        "--long-prefill-token-threshold, so that shorter ones overtake them; 0: no limit. "
        "Default: 1 if there is a threshold.",
        rich_help_panel=BATCH_PANEL,
    ),
]
ChunkedPrefill = Annotated[
    bool,
    typer.Option(
        help="Compute a prompt in chunks over several steps. Without it, a prompt longer than "
        "--max-num-batched-tokens is refused.",
        rich_help_panel=BATCH_PANEL,
    ),
]
TargetStep = Annotated[
    float,
    typer.Option(
        min=0,
        help="Target duration of a step while requests decode, in milliseconds: prompts get as "
        "many tokens as fit into it, estimated from earlier steps; 0: no target.",
        rich_help_panel=BATCH_PANEL,
    ),
]
