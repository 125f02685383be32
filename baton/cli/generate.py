"""`baton generate`: one prompt, streamed to the terminal."""

from __future__ import annotations

from typing import Annotated

import typer


def generate(
    prompt: Annotated[str, typer.Argument(help="What to continue.")],
    address: Annotated[str, typer.Option(help="host:port of the router.")] = "127.0.0.1:50051",
    max_tokens: Annotated[int, typer.Option(help="The most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answer.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer.")] = None,
) -> None:
    """Ask a running cluster to continue a prompt."""
    from baton.client import Client, Generation
    from engine.sampling import SamplingParams

    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    with Client(address) as client:
        for chunk in client.stream(prompt, Generation(sampling, stop=tuple(stop or ()))):
            print(chunk.text, end="", flush=True)
    print()
