"""`python -m benchmarks perplexity`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from baton.cli.options.model import Threads
from baton.cli.options.output import JsonFile
from baton.cli.show import show_table, write_json
from baton.core.errors import InvalidConfig


def perplexity(
    model: Annotated[str, typer.Argument(help="Model folder or GGUF file.")],
    text: Annotated[Path, typer.Option(help="Text file, in UTF-8.")],
    variants: Annotated[
        str,
        typer.Option(
            help="DTYPE[/QUANTIZE[/KV_CACHE_DTYPE[/ACTIVATION_DTYPE]]] of each variant; losses are "
            "relative to the first one."
        ),
    ] = "bfloat16,bfloat16/int8,bfloat16/int4,bfloat16/none/int8",
    quantize_importance: Annotated[
        Path | None,
        typer.Option(help="File of tools.measure_importance; int4 is measured with it too."),
    ] = None,
    window: Annotated[int, typer.Option(min=4, help="Tokens of a window.")] = 512,
    windows: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of windows. Default: the whole text.")
    ] = None,
    threads: Threads = None,
    llamacpp_venv: Annotated[
        Path | None,
        typer.Option(
            help="Virtual environment with llama-cpp-python, which scores the same tokens. The "
            "model must be a GGUF file."
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Measure a text's perplexity under dtypes and quantizations of a model.

    Windows do not overlap; the tokens of their second halves are scored.
    """
    from benchmarks.quality.perplexity import (
        PerplexityBench,
        Score,
        parse_variants,
        run,
        with_importance,
    )

    parsed = parse_variants(variants)
    if quantize_importance is not None:
        parsed = with_importance(parsed, str(quantize_importance))
    bench = PerplexityBench(
        model,
        _read_text(text),
        parsed,
        window=window,
        max_windows=windows,
        num_threads=threads,
        llamacpp_venv=llamacpp_venv,
    )
    with Console(stderr=True).status("loading") as status:

        def on_score(score: Score) -> None:
            status.update(f"{score.variant}: {score.perplexity:.4f}")

        scores = run(bench, on_score)
    rows = [
        {
            "variant": score.variant,
            "perplexity": f"{score.perplexity:.4f}",
            "loss": f"{score.loss:+.2%}",
            "tokens": score.num_tokens,
        }
        for score in scores
    ]
    show_table(f"{model}, {text.name}, windows of {window}", rows)
    values = {"model": model, "text": str(text), "window": window}
    write_json(json_file, {**values, "scores": [asdict(score) for score in scores]})


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"--text {path} cannot be read: {error}") from None
