"""`baton run`: prompts to answers in this process, without servers."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from baton.units import format_bytes


def run(
    prompts: Annotated[
        list[str] | None, typer.Argument(help="What to continue; without any, standard input.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="Model folder, or a name on the Hugging Face hub.")
    ] = "models/demo",
    max_tokens: Annotated[int, typer.Option(help="The most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this mass.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answer.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    kv_cache_memory: Annotated[
        str | None, typer.Option(help="Size of the KV cache, such as 512MiB; half of what is free.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of torch.")] = None,
) -> None:
    """Continue prompts with a model loaded here."""
    from baton.llm import LLM
    from engine.sampling import SamplingParams

    asked = prompts or [sys.stdin.read()]
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed
    )
    with LLM(
        model, dtype=dtype, device=device, kv_cache_memory=kv_cache_memory, num_threads=threads
    ) as llm:
        size = f"{llm.kv_memory.num_blocks} blocks, {llm.kv_memory.num_tokens} tokens"
        print(f"KV cache: {format_bytes(llm.kv_memory.num_bytes)}, {size}", file=sys.stderr)
        for prompt, answer in zip(asked, llm.generate(asked, sampling), strict=True):
            print(prompt + answer.text)
            if answer.error is not None:
                print(f"baton: the answer broke off: {answer.error}", file=sys.stderr)
