"""`baton generate`: one prompt, streamed to the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.errors import print_warning
from baton.cli.options.connection import call_router, connect
from baton.cli.options.sampling import SAMPLING, IncludeStop, StopStrings, sampling
from baton.cli.show import console, for_terminal, table_of
from baton.cli.signatures import inherit_options, make
from baton.core.errors import InvalidRequest
from baton.core.kv_hints import KvHints
from baton.core.options import MODEL, OUTPUT, Option
from baton.core.units import format_bytes

if TYPE_CHECKING:
    from baton.client import Answer, AsyncClient, Finish, Generation


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Parameters of a request that only this command has."""

    logprobs: Annotated[
        int | None,
        Option(
            "Show the logprob of each token and those of the N most likely ones.",
            OUTPUT,
            at_least=0,
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None, Option("Logprobs of the prompt's tokens; needs --json.", OUTPUT, at_least=0)
    ] = None
    model: Annotated[str, Option("Model to use. Default: the only one that generates.", MODEL)] = ""
    n: Annotated[int, Option("Number of answers.", OUTPUT, flags=("-n", "--n"), at_least=1)] = 1
    stop: StopStrings = None
    include_stop_in_output: IncludeStop = False
    bad_words: Annotated[
        list[str] | None,
        Option(
            "Text that the answer must not contain; may be repeated.",
            SAMPLING,
            flags=("--bad-word",),
        ),
    ] = None
    request_id: Annotated[str, Option("Request id in logs and traces.")] = ""
    priority: Annotated[int, Option("Priority; lower values run earlier.")] = 0
    cache_salt: Annotated[str, Option("Prompts with different salts never share cached KV.")] = ""


@inherit_options(RequestOptions, sampling, KvHints, connect)
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="Prompt to continue. Default or -: standard input.")
    ] = None,
    as_json: Annotated[
        bool, Option("Print one JSON object instead of text.", OUTPUT, flags=("--json",))
    ] = False,
    timings: Annotated[
        bool,
        Option(
            "Print timings and the serving nodes to standard error.", OUTPUT, flags=("--timings",)
        ),
    ] = False,
    **given: Any,
) -> None:
    """Continue a prompt on a running cluster."""
    generation, text = _generation(given), _prompt(prompt)
    answers = call_router(given, lambda client: _stream(client, text, generation, as_json=as_json))
    finishes = [each.finish for each in answers if each.finish is not None]
    for warning in dict.fromkeys(each for finish in finishes for each in finish.warnings):
        print_warning(warning)
    for finish in finishes if timings else ():
        print(timing_line(finish), file=sys.stderr)


def _generation(given: dict[str, Any]) -> Generation:
    """Raises InvalidRequest."""
    from baton.client import Generation

    chosen, request = make(sampling, given), asdict(make(RequestOptions, given))
    for name in ("logprobs", "prompt_logprobs"):
        number = request.pop(name)
        chosen |= {} if number is None else {name: number}
    for name in ("stop", "bad_words"):
        request[name] = tuple(request[name] or ())
    return Generation(chosen, kv_hints=make(KvHints, given), **request)


async def _stream(
    client: AsyncClient, prompt: str, generation: Generation, *, as_json: bool
) -> list[Answer]:
    """Print the answers; several cannot be streamed to one terminal, and come at the end."""
    from baton.client import Answer

    answers = [Answer() for _ in range(generation.n)]
    async with aclosing(client.stream(prompt, generation)) as chunks:
        shows = generation.n == 1 and not as_json
        async for chunk in chunks:
            answers[chunk.index].take(chunk)
            print(for_terminal(chunk.text) if shows else "", end="", flush=True)
        print(_format_end(answers, as_json=as_json))
        for answer in answers if not as_json else ():
            if answer.logprobs:
                await _show_logprobs(client, answer, generation.model)
    return answers


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


async def _show_logprobs(client: AsyncClient, answer: Answer, model: str) -> None:
    named = {token.token_id for token in answer.logprobs}
    named |= {token_id for token in answer.logprobs for token_id, _ in token.top}
    text = {token_id: repr(await client.detokenize([token_id], model=model)) for token_id in named}
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
