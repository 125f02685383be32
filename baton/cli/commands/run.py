"""`baton run`: offline generation in this process, without servers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.errors import FAILED, print_error, print_warning
from baton.cli.options.model import (
    Device,
    Dtype,
    KvDtype,
    ModelOrDemo,
    Speculative,
    SpeculativeModel,
    Threads,
)
from baton.cli.options.sampling import IncludeStop, StopStrings, sampling
from baton.cli.signatures import inherit_options
from baton.core.options import KV_CACHE, Option
from baton.core.units import format_bytes
from baton.demo_model import demo_model
from baton.encoding import reject_invalid_text
from baton.imports import quick_imports

if TYPE_CHECKING:
    from baton.completion import Completion
    from baton.engine.runner.model.config import ModelConfig

BLOCK_SIZE, MAX_NUM_SEQS = 16, 128  # the defaults of LLM


@inherit_options(sampling)
def run(
    prompts: Annotated[
        list[str] | None, typer.Argument(help="Prompts to continue. Default: standard input.")
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Each prompt is a message of a chat; only the answer is printed."
        ),
    ] = False,
    model: ModelOrDemo = "",
    dtype: Dtype = "auto",
    device: Device = "cpu",
    threads: Threads = None,
    speculative: Speculative = "",
    speculative_model: SpeculativeModel = "",
    kv_cache_memory: Annotated[
        str | None,
        Option(
            "Size of the KV cache, such as 512MiB. Default: what prompts and answers need, at most "
            "half of the free memory.",
            KV_CACHE,
        ),
    ] = None,
    kv_cache_dtype: KvDtype = "auto",
    stop: StopStrings = None,
    include_stop_in_output: IncludeStop = False,
    **given: Any,
) -> None:
    """Continue prompts, or answer them with --chat, with a model loaded in this process.

    A single answer is printed while it is generated.
    """
    chosen = sampling(**given)
    texts = prompts or [sys.stdin.read()]
    with reject_invalid_text():
        "".join(texts).encode()
    with quick_imports():
        # Slow imports, after the checks.
        from baton.checkpoint.hub import open_checkpoint
        from baton.engine.runner import load  # noqa: F401 - for LLM, which imports it later
        from baton.engine.runner.families.read_config import read_model_config
        from baton.engine.runner.open_runner import kind_of
        from baton.llm import LLM  # imports torch

    checkpoint = open_checkpoint(model or demo_model())
    tokenizer = checkpoint.load_tokenizer()
    chats = [[{"role": "user", "content": text}] for text in texts if chat]
    encoded = [*map(tokenizer.encode_chat, chats)] or [*map(tokenizer.encode, texts)]
    longest = max(map(len, encoded)) + chosen["max_tokens"]
    planned = None
    if kind_of(checkpoint) is None:
        planned = _planned_len(longest, read_model_config(checkpoint))
    with LLM(
        str(checkpoint.path),
        tokenizer=tokenizer,
        max_num_seqs=min(len(texts), MAX_NUM_SEQS),
        max_model_len=planned,
        dtype=dtype,
        device=device,
        kv_cache_memory=kv_cache_memory,
        kv_cache_dtype=kv_cache_dtype,
        num_threads=threads,
        speculative=speculative,
        speculative_model=speculative_model,
    ) as llm:
        if (kv := llm.kv_memory) is not None:
            size = f"{kv.num_blocks} blocks, {kv.num_tokens} tokens"
            print(f"KV cache: {format_bytes(kv.num_bytes)}, {size}", file=sys.stderr)
        begins = [""] * len(texts) if chat else [*texts]
        streams = len(texts) == 1
        answers = llm.generate(
            encoded,
            llm.info.defaults.sampling.params(**chosen),
            stop=stop or (),
            include_stop_in_output=include_stop_in_output,
            on_text=partial(_print_text, begins) if streams else None,
        )
    _print_answers(begins, answers, are_printed=streams)
    if not chat and tokenizer.has_chat_template and not all(answer.text for answer in answers):
        print_warning("the model ended an answer at once; to ask instead, add --chat")


def _print_text(begins: list[str], index: int, text: str) -> None:
    """Print new text of an answer, after its beginning, which is printed once."""
    print(begins[index] + text, end="", flush=True)
    begins[index] = ""


def _print_answers(
    begins: Sequence[str], answers: Sequence[Completion], *, are_printed: bool
) -> None:
    for begin, answer in zip(begins, answers, strict=True):
        print(begin + ("" if are_printed else answer.text))
        for warning in answer.warnings:
            print_warning(warning)
        if answer.error is not None:
            print_error(f"the answer is incomplete: {answer.error}")
    if any(answer.error is not None for answer in answers):
        raise typer.Exit(FAILED)


def _planned_len(longest: int, config: ModelConfig) -> int | None:
    """Return the context length to plan KV for, or None for the model's own.

    Prompts that do not fit into the model's context are refused by its own limit.
    """
    planned = (-(-longest // BLOCK_SIZE) + 1) * BLOCK_SIZE
    return planned if planned < config.max_context_len() else None
