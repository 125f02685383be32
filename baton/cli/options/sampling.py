"""Sampling options of every command that generates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.core.errors import InvalidRequest
from baton.core.sampling import SamplingParams
from baton.core.structured_outputs import parse_structured_outputs

if TYPE_CHECKING:
    from baton.client.generation import Sampling

FORM_PANEL = "Structured output"
SAMPLING_PANEL = "Sampling"


def _option(*names: str, help: str, **more: Any) -> Any:  # noqa: A002
    return typer.Option(*names, help=help, rich_help_panel=SAMPLING_PANEL, **more)


# None: the default of the model's generation_config.json.
Chosen = float | None

MaxTokens = Annotated[int, _option(help="Maximum number of tokens to generate.")]
MinTokens = Annotated[
    int | None, _option(help="Minimum number of tokens before the answer may end.")
]
Temperature = Annotated[Chosen, _option(help="0 is greedy. Default: as the model recommends.")]
TopP = Annotated[
    Chosen, _option(help="Keep the most likely tokens up to this cumulative probability.")
]
TopK = Annotated[int | None, _option(help="Keep the K most likely tokens; 0 keeps all.")]
MinP = Annotated[
    Chosen, _option(help="Keep tokens of at least this probability, relative to the most likely.")
]
RepetitionPenalty = Annotated[Chosen, _option(help="Values above 1 discourage repetition.")]
PresencePenalty = Annotated[Chosen, _option(help="Penalty on tokens that the answer already has.")]
FrequencyPenalty = Annotated[
    Chosen, _option(help="Penalty on tokens, per occurrence in the answer.")
]
Seed = Annotated[int | None, _option(help="Random seed; the same seed gives the same answer.")]
TokenIds = Annotated[
    list[int] | None,
    _option("--stop-token-id", help="Token id that also ends the answer; may be repeated."),
]
IgnoreEos = Annotated[
    bool, _option("--ignore-eos", help="Do not stop at the end-of-sequence token.")
]
StopStrings = Annotated[
    list[str] | None, _option("--stop", help="Text that ends the answer; may be repeated.")
]
BadWords = Annotated[
    list[str] | None,
    typer.Option(
        "--bad-word",
        help="Text that the answer must not contain; may be repeated.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
IncludeStop = Annotated[
    bool,
    _option("--include-stop-in-output", help="Keep the stop text in the answer."),
]


def _form(*names: str, help: str, **more: Any) -> Any:  # noqa: A002
    return typer.Option(*names, help=help, rich_help_panel=FORM_PANEL, **more)


_FILE: dict[str, Any] = {"exists": True, "dir_okay": False, "metavar": "FILE"}
JsonSchema = Annotated[
    Path | None, _form("--json-schema", help="File with the JSON schema of the answer.", **_FILE)
]
JsonObject = Annotated[bool, _form("--json-object", help="The answer is a JSON object.")]
Regex = Annotated[
    str | None, _form("--regex", help="Regular expression that the whole answer matches.")
]
Choices = Annotated[
    list[str] | None, _form("--choice", help="Allowed text of the whole answer; may be repeated.")
]
GrammarFile = Annotated[
    Path | None, _form("--grammar", help="File with a grammar in Lark or GBNF syntax.", **_FILE)
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
    """Return the parameters that were set. Raises InvalidRequest."""
    given: dict[str, Any] = locals()
    form = {
        "json": _read(given.pop("json_schema")),
        "json_object": given.pop("json_object"),
        "regex": given.pop("regex"),
        "choice": tuple(given.pop("choices") or ()),
        "grammar": _read(given.pop("grammar")),
    }
    if any(value not in (None, False, ()) for value in form.values()):
        given["structured_outputs"] = parse_structured_outputs(form)
    chosen = {name: value for name, value in given.items() if value is not None}
    SamplingParams(**chosen)  # validates the values
    return chosen  # type: ignore[return-value]  # the options have its keys


def _read(path: Path | None) -> str | None:
    """Read a UTF-8 file. Raises InvalidRequest if it is not UTF-8."""
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is not valid UTF-8: {error}; convert it first") from error
