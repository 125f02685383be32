"""How tokens are chosen: options of every command that generates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.options import FORM_PANEL, SAMPLING_PANEL
from engine.errors import InvalidRequest
from engine.sampling import SamplingParams
from engine.structured_outputs import structured_outputs_of

if TYPE_CHECKING:
    from baton.generation import Sampling


def _option(*names: str, help: str, **more: Any) -> Any:  # noqa: A002
    return typer.Option(*names, help=help, rich_help_panel=SAMPLING_PANEL, **more)


# What is left out is as the model's makers advise.
Chosen = float | None

MaxTokens = Annotated[int, _option(help="The most tokens to generate.")]
MinTokens = Annotated[int | None, _option(help="Nothing ends the answer before.")]
Temperature = Annotated[
    Chosen, _option(help="0 is greedy; left out, as the model's makers advise.")
]
TopP = Annotated[Chosen, _option(help="Keep the likeliest tokens up to this mass.")]
TopK = Annotated[int | None, _option(help="Keep so many of the likeliest; 0 keeps all.")]
MinP = Annotated[Chosen, _option(help="Keep tokens at least this likely.")]
RepetitionPenalty = Annotated[Chosen, _option(help="Above 1 shuns repeats.")]
PresencePenalty = Annotated[Chosen, _option(help="Against tokens that it holds.")]
FrequencyPenalty = Annotated[Chosen, _option(help="The same, each time anew.")]
Seed = Annotated[int | None, _option(help="Same seed, same answer.")]
TokenIds = Annotated[list[int] | None, _option("--stop-token-id", help="Token that ends it, too.")]
IgnoreEos = Annotated[bool, _option("--ignore-eos", help="Go on after the model's own end token.")]
StopStrings = Annotated[
    list[str] | None, _option("--stop", help="Text that ends the answer; may be given often.")
]
BadWords = Annotated[
    list[str] | None,
    typer.Option(
        "--bad-word",
        help="A text that the answer must not hold; may be given often.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
IncludeStop = Annotated[
    bool,
    _option("--include-stop-in-output", help="Leave the text that ended it in the answer."),
]


def _form(*names: str, help: str, **more: Any) -> Any:  # noqa: A002
    return typer.Option(*names, help=help, rich_help_panel=FORM_PANEL, **more)


_FILE: dict[str, Any] = {"exists": True, "dir_okay": False, "metavar": "FILE"}
JsonSchema = Annotated[
    Path | None, _form("--json-schema", help="File with a schema of its JSON.", **_FILE)
]
JsonObject = Annotated[bool, _form("--json-object", help="Any JSON object.")]
Regex = Annotated[str | None, _form("--regex", help="What all of it matches.")]
Choices = Annotated[
    list[str] | None, _form("--choice", help="A text that it may be; may be given often.")
]
GrammarFile = Annotated[
    Path | None, _form("--grammar", help="File with a grammar, Lark's or GBNF.", **_FILE)
]


def sampling(
    max_tokens: MaxTokens = 128,
    min_tokens: MinTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    presence_penalty: PresencePenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    seed: Seed = None,
    stop_token_ids: TokenIds = None,
    ignore_eos: IgnoreEos = False,
    json_schema: JsonSchema = None,
    json_object: JsonObject = False,
    regex: Regex = None,
    choices: Choices = None,
    grammar: GrammarFile = None,
) -> Sampling:
    """What was chosen. Raises InvalidRequest."""
    given: dict[str, Any] = locals()
    form = {
        "json": _read(given.pop("json_schema")),
        "json_object": given.pop("json_object"),
        "regex": given.pop("regex"),
        "choice": tuple(given.pop("choices") or ()),
        "grammar": _read(given.pop("grammar")),
    }
    if any(value not in (None, False, ()) for value in form.values()):
        given["structured_outputs"] = structured_outputs_of(form)
    chosen = {name: value for name, value in given.items() if value is not None}
    SamplingParams(**chosen)  # it complains of what cannot be
    return chosen  # type: ignore[return-value]  # the options have its keys


def _read(path: Path | None) -> str | None:
    """Raises InvalidRequest for what is no text."""
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is no valid UTF-8: {error}; convert it first") from error
