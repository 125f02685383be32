"""`baton generate`: one prompt, streamed to the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.errors import print_warning
from baton.cli.options.connection import connect
from baton.cli.options.kv_hints import kv_hints
from baton.cli.options.output import OUTPUT_PANEL
from baton.cli.options.sampling import BadWords, IncludeStop, StopStrings, sampling
from baton.cli.show import console, for_terminal, table_of
from baton.cli.signatures import inherit_options, split
from baton.core.errors import InvalidRequest
from baton.core.options import MODEL
from baton.core.units import format_bytes

if TYPE_CHECKING:
    from baton.client import Answer, AsyncClient, Finish

Logprobs = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Show the logprob of each token and those of the N most likely ones.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]


@inherit_options(sampling, kv_hints, connect)
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="Prompt to continue. Default or -: standard input.")
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print one JSON object instead of text.", rich_help_panel=OUTPUT_PANEL
        ),
    ] = False,
    logprobs: Logprobs = None,
    prompt_logprobs: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Logprobs of the prompt's tokens; needs --json.",
            rich_help_panel=OUTPUT_PANEL,
        ),
    ] = None,
    timings: Annotated[
        bool,
        typer.Option(
            "--timings",
            help="Print timings and the serving nodes to standard error.",
            rich_help_panel=OUTPUT_PANEL,
        ),
    ] = False,
    model: Annotated[
        str,
        typer.Option(help="Fail unless the cluster serves this model.", rich_help_panel=MODEL),
    ] = "",
    n: Annotated[
        int,
        typer.Option("-n", "--n", min=1, help="Number of answers.", rich_help_panel=OUTPUT_PANEL),
    ] = 1,
    stop: StopStrings = None,
    include_stop_in_output: IncludeStop = False,
    bad_words: BadWords = None,
    request_id: Annotated[str, typer.Option(help="Request id in logs and traces.")] = "",
    priority: Annotated[int, typer.Option(help="Priority; lower values run earlier.")] = 0,
    cache_salt: Annotated[
        str, typer.Option(help="Prompts with different salts never share cached KV.")
    ] = "",
    **given: Any,
) -> None:
    """Continue a prompt on a running cluster."""
    import asyncio

    from baton.client import Answer, Generation

    for_sampling, for_hints, for_connection = split(given, sampling, kv_hints, connect)
    chosen = sampling(**for_sampling)
    if logprobs is not None:
        chosen["logprobs"] = logprobs
    if prompt_logprobs is not None:
        chosen["prompt_logprobs"] = prompt_logprobs
    generation = Generation(
        chosen,
        stop=tuple(stop or ()),
        include_stop_in_output=include_stop_in_output,
        bad_words=tuple(bad_words or ()),
        request_id=request_id,
        model=model,
        priority=priority,
        cache_salt=cache_salt,
        kv_hints=kv_hints(**for_hints),
        n=n,
    )
    prompt_text = _prompt(prompt)

    async def stream() -> list[Answer]:
        answers = [Answer() for _ in range(n)]
        async with (
            connect(**for_connection) as client,
            aclosing(client.stream(prompt_text, generation)) as chunks,
        ):
            # Several answers cannot be streamed to one terminal: they are printed at the end.
            shows = n == 1 and not as_json
            async for chunk in chunks:
                answers[chunk.index].take(chunk)
                print(for_terminal(chunk.text) if shows else "", end="", flush=True)
            print(_format_end(answers, as_json=as_json))
            if logprobs is not None and not as_json:
                for answer in answers:
                    await _show_logprobs(client, answer)
        return answers

    finishes = [each.finish for each in asyncio.run(stream()) if each.finish is not None]
    for warning in dict.fromkeys(each for finish in finishes for each in finish.warnings):
        print_warning(warning)
    for finish in finishes if timings else ():
        print(timing_line(finish), file=sys.stderr)


def _format_end(answers: Sequence[Answer], *, as_json: bool) -> str:
    """Format the output at the end; empty for a single answer, which was streamed."""
    if as_json:
        values = [as_values(answer) for answer in answers]
        return json.dumps(values[0] if len(values) == 1 else {"answers": values})
    if len(answers) == 1:
        return ""
    texts = enumerate(for_terminal(answer.text) for answer in answers)
    return "\n".join(f"--- {index}\n{text}" for index, text in texts)


def as_values(answer: Answer) -> dict[str, Any]:
    """Return the values that `--json` prints, under the names of the gRPC contract."""
    values = asdict(answer)
    finish = values.pop("finish") or {}
    usage = ("num_prompt_tokens", "num_completion_tokens", "num_cached_prompt_tokens")
    timings = ("dispatched_s", "first_token_s", "first_decoded_token_s", "finished_s")
    return {
        **values,
        "finish_reason": finish.get("reason"),
        "stop_token_id": finish.get("stop_token_id"),
        "stop_string": finish.get("stop_string"),
        "usage": {name.removeprefix("num_"): finish.get(name) for name in usage},
        "timings": {name: finish.get(name) for name in timings},
        "served": finish.get("served"),
        "warnings": finish.get("warnings"),
    }


def timing_line(finish: Finish) -> str:
    served = finish.served
    seconds = finish.finished_s - finish.first_token_s
    num_later = finish.num_completion_tokens - 1
    rate = f" ({num_later / seconds:.1f}/s)" if seconds > 0 and num_later >= 0 else ""
    kv = f", {format_bytes(served.kv_bytes)} of KV over {served.kv_transport}"
    kv += f" ({served.kv_conversion})" if served.kv_conversion else ""
    nodes = f"{served.prefill_node} → {served.decode_node}{kv}"
    here = f"{served.decode_node or served.prefill_node} alone ({served.prefill_reason})"
    return (
        f"{finish.num_prompt_tokens} prompt tokens, first token after "
        f"{finish.first_token_s * 1000:.1f} ms, {finish.num_completion_tokens} new tokens{rate}, "
        f"ended by {finish.reason}; {nodes if served.is_prefill_remote else here}"
    )


def _prompt(argument: str | None) -> str:
    if argument is not None and argument != "-":
        return argument
    if argument is None and sys.stdin.isatty():
        raise InvalidRequest("no prompt: pass one as an argument, or pipe it in")
    return sys.stdin.read()


async def _show_logprobs(client: AsyncClient, answer: Answer) -> None:
    named = {token.token_id for token in answer.logprobs}
    named |= {token_id for token in answer.logprobs for token_id, _ in token.top}
    text = {token_id: repr(await client.detokenize([token_id])) for token_id in named}
    rows = [
        {
            "token": text[token.token_id],
            "id": token.token_id,
            "logprob": round(token.logprob, 4),
            "rank": token.rank,
            "likeliest": "  ".join(
                f"{text[top_id]} {logprob:.2f}" for top_id, logprob in token.top
            ),
        }
        for token in answer.logprobs
    ]
    console(stderr=True).print(table_of("logprobs", rows))
