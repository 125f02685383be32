"""Sampling options of every command that generates."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from baton.cli.signatures import inherit_options
from baton.core.errors import InvalidRequest
from baton.core.options import Option, build_config
from baton.core.sampling import SamplingParams
from baton.core.structured_outputs import parse_structured_outputs

if TYPE_CHECKING:
    from baton.client.generation import Sampling

SAMPLING = "Sampling"
FORM = "Structured output"

MaxTokens = Annotated[int, Option("Maximum number of tokens to generate.", SAMPLING)]
StopStrings = Annotated[
    list[str] | None, Option("Text that ends the answer; may be repeated.", SAMPLING)
]
IncludeStop = Annotated[
    bool,
    Option("Keep the stop text in the answer.", SAMPLING, flags=("--include-stop-in-output",)),
]


def _read(path: Path | None) -> str | None:
    """Read a UTF-8 file. Raises InvalidRequest."""
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is not valid UTF-8: {error}; convert it first") from error


def _read_json(path: Path | None) -> str | None:
    """Read a file of JSON. Raises InvalidRequest."""
    text = _read(path)
    try:
        if text is not None:
            json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path} is not JSON: {error}") from error
    return text


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """None: the default of the model."""

    max_tokens: MaxTokens = 128
    min_tokens: Annotated[
        int | None, Option("Minimum number of tokens before the answer may end.", SAMPLING)
    ] = None
    temperature: Annotated[
        float | None, Option("0 is greedy. Default: as the model recommends.", SAMPLING)
    ] = None
    top_p: Annotated[
        float | None,
        Option("Keep the most likely tokens up to this cumulative probability.", SAMPLING),
    ] = None
    top_k: Annotated[
        int | None, Option("Keep the K most likely tokens; 0 keeps all.", SAMPLING)
    ] = None
    min_p: Annotated[
        float | None,
        Option("Keep tokens of at least this probability, relative to the most likely.", SAMPLING),
    ] = None
    repetition_penalty: Annotated[
        float | None, Option("Values above 1 discourage repetition.", SAMPLING)
    ] = None
    presence_penalty: Annotated[
        float | None, Option("Penalty on tokens that the answer already has.", SAMPLING)
    ] = None
    frequency_penalty: Annotated[
        float | None, Option("Penalty on tokens, per occurrence in the answer.", SAMPLING)
    ] = None
    seed: Annotated[
        int | None, Option("Random seed; the same seed gives the same answer.", SAMPLING)
    ] = None
    stop_token_ids: Annotated[
        list[int] | None,
        Option(
            "Token id that also ends the answer; may be repeated.",
            SAMPLING,
            flags=("--stop-token-id",),
        ),
    ] = None
    ignore_eos: Annotated[
        bool, Option("Do not stop at the end-of-sequence token.", SAMPLING, flags=("--ignore-eos",))
    ] = False
    json_schema: Annotated[
        str | None,
        Option(
            "File with the JSON schema of the answer.", FORM, kind=Path | None, parse=_read_json
        ),
    ] = None
    json_object: Annotated[
        bool, Option("The answer is a JSON object.", FORM, flags=("--json-object",))
    ] = False
    regex: Annotated[
        str | None, Option("Regular expression that the whole answer matches.", FORM)
    ] = None
    choices: Annotated[
        list[str] | None,
        Option("Allowed text of the whole answer; may be repeated.", FORM, flags=("--choice",)),
    ] = None
    grammar: Annotated[
        str | None,
        Option("File with a grammar in Lark or GBNF syntax.", FORM, kind=Path | None, parse=_read),
    ] = None


@inherit_options(SamplingOptions)
def sampling(**given: Any) -> Sampling:
    """Return the parameters that were set. Raises InvalidRequest."""
    chosen = asdict(build_config(SamplingOptions, given))
    form = {
        "json": chosen.pop("json_schema"),
        "json_object": chosen.pop("json_object"),
        "regex": chosen.pop("regex"),
        "choice": tuple(chosen.pop("choices") or ()),
        "grammar": chosen.pop("grammar"),
    }
    if any(value not in (None, False, ()) for value in form.values()):
        chosen["structured_outputs"] = parse_structured_outputs(form)
    chosen = {name: value for name, value in chosen.items() if value is not None}
    SamplingParams(**chosen)  # validates the values
    return chosen  # type: ignore[return-value]  # the options have its keys
