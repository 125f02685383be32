"""How tokens are chosen: options of every command that generates."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from baton.cli.options import SAMPLING_PANEL
from engine.sampling import SamplingParams


def _option(*names: str, help: str, **more: Any) -> Any:  # noqa: A002
    return typer.Option(*names, help=help, rich_help_panel=SAMPLING_PANEL, **more)


MaxTokens = Annotated[int, _option(help="The most tokens to generate.")]
Temperature = Annotated[float, _option(help="0 is greedy.")]
TokenIds = Annotated[list[int] | None, _option("--stop-token-id", help="Token that ends it, too.")]
StopStrings = Annotated[
    list[str] | None, _option("--stop", help="Text that ends the answer; may be given often.")
]
IncludeStop = Annotated[
    bool,
    _option("--include-stop-in-output", help="Leave the text that ended it in the answer."),
]


def sampling_params(
    max_tokens: MaxTokens = 128,
    min_tokens: Annotated[int, _option(help="Nothing ends the answer before.")] = 0,
    temperature: Temperature = 0.0,
    top_p: Annotated[float, _option(help="Keep the likeliest tokens up to this mass.")] = 1.0,
    top_k: Annotated[int, _option(help="Keep so many of the likeliest; 0 keeps all.")] = 0,
    min_p: Annotated[float, _option(help="Keep tokens at least this likely.")] = 0.0,
    repetition_penalty: Annotated[float, _option(help="Above 1 shuns repeats.")] = 1.0,
    presence_penalty: Annotated[float, _option(help="Against tokens that it holds.")] = 0.0,
    frequency_penalty: Annotated[float, _option(help="The same, each time anew.")] = 0.0,
    seed: Annotated[int | None, _option(help="Same seed, same answer.")] = None,
    stop_token_ids: TokenIds = None,
    ignore_eos: Annotated[
        bool, _option("--ignore-eos", help="Go on after the model's own end token.")
    ] = False,
) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop_token_ids=tuple(stop_token_ids or ()),
        ignore_eos=ignore_eos,
    )
