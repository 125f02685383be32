"""Perplexity benchmark: a text under several dtypes and quantizations of one model.

The text is cut into windows that do not overlap. Each begins with the tokenizer's BOS token, if it
has one, and the tokens of its second half are scored, as llama-perplexity does.
"""

from __future__ import annotations

import json
import math
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from baton import LLM, SamplingParams
from baton.checkpoint.hub import open_checkpoint
from baton.checkpoint.tokenizer import Tokenizer
from baton.core.errors import InvalidConfig
from baton.core.output import TokenLogprobs
from baton.engine.runner.config import RunnerConfig
from benchmarks.peers.settings import clean_environment, python_of
from benchmarks.processes import external_process

WORKER = Path(__file__).parent / "llamacpp_worker.py"
WINDOWS_PER_CALL = 8

Windows = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Variant:
    """Settings that change the numbers a model computes with."""

    dtype: str
    quantize: str = "none"
    kv_cache_dtype: str = "auto"
    activation_dtype: str = "auto"
    quantize_importance: str = ""

    @property
    def name(self) -> str:
        """Return the variant as it is written, without defaults at its end."""
        fields = [self.dtype, self.quantize, self.kv_cache_dtype, self.activation_dtype]
        for default in ("auto", "auto", "none"):
            if fields[-1] != default:
                break
            fields.pop()
        return "/".join(fields) + (" with importance" if self.quantize_importance else "")


@dataclass(frozen=True, slots=True)
class PerplexityBench:
    """Settings of the benchmark."""

    model: str
    text: str
    variants: Sequence[Variant]
    window: int = 512
    max_windows: int | None = None
    num_threads: int | None = None
    llamacpp_venv: Path | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """Perplexity of one variant, over all scored tokens."""

    variant: str
    perplexity: float
    loss: float  # share of the first variant's perplexity
    num_tokens: int


def parse_variants(written: str) -> list[Variant]:
    """Parse DTYPE[/QUANTIZE[/KV_CACHE_DTYPE[/ACTIVATION_DTYPE]]], separated by commas.

    Raises InvalidConfig.
    """
    variants = []
    for each in written.split(","):
        fields = each.strip().split("/")
        if len(fields) > 4 or not all(fields):
            raise InvalidConfig(
                f"{each!r} is not a variant; write DTYPE/QUANTIZE/KV_CACHE_DTYPE/"
                "ACTIVATION_DTYPE, such as bfloat16, bfloat16/int4 or bfloat16/none/int8"
            )
        variant = Variant(*fields)
        RunnerConfig(
            "model",
            dtype=variant.dtype,
            quantize=variant.quantize,
            kv_cache_dtype=variant.kv_cache_dtype,
            activation_dtype=variant.activation_dtype,
        )  # raises InvalidConfig for other names, before any model is loaded
        variants.append(variant)
    return variants


def with_importance(variants: Sequence[Variant], path: str) -> list[Variant]:
    """Return the variants, and those in int4 again with the importance in a file."""
    weighted = [each for each in variants if each.quantize == "int4"]
    return [*variants, *(replace(each, quantize_importance=path) for each in weighted)]


def run(bench: PerplexityBench, on_score: Callable[[Score], None]) -> list[Score]:
    """Run the benchmark; `on_score` is called with each result."""
    windows = _windows(bench, open_checkpoint(bench.model).load_tokenizer())
    scores: list[Score] = []
    for name, negative in _measured(bench, windows):
        perplexity = math.exp(negative / _num_scored(windows))
        first = scores[0].perplexity if scores else perplexity
        scores.append(Score(name, perplexity, perplexity / first - 1, _num_scored(windows)))
        on_score(scores[-1])
    return scores


def cut_windows(text_ids: Sequence[int], bos_ids: Sequence[int], length: int) -> list[list[int]]:
    """Cut a text into windows of `length` tokens, each after a BOS token. The rest is left out."""
    step = length - len(bos_ids)
    starts = range(0, len(text_ids) - step + 1, step)
    return [[*bos_ids, *text_ids[start : start + step]] for start in starts]


def negative_log_likelihood(logprobs: Sequence[TokenLogprobs | None]) -> float:
    """Add up the negative logprobs of the second half of a window."""
    scored = logprobs[len(logprobs) // 2 :]
    return -math.fsum(each.logprob for each in scored if each is not None)


def _windows(bench: PerplexityBench, tokenizer: Tokenizer) -> list[list[int]]:
    text_ids = tokenizer.encode(bench.text, add_special_tokens=False)
    windows = cut_windows(text_ids, tokenizer.encode(""), bench.window)[: bench.max_windows]
    if not windows:
        raise InvalidConfig(f"the text has {len(text_ids)} tokens, less than --window")
    return windows


def _num_scored(windows: Windows) -> int:
    return sum(len(window) - len(window) // 2 for window in windows)


def _measured(bench: PerplexityBench, windows: Windows) -> Iterator[tuple[str, float]]:
    """Yield the negative log-likelihood of the text under each variant."""
    for variant in bench.variants:
        yield variant.name, _measure(bench, variant, windows)
    if bench.llamacpp_venv is not None:
        yield "llama.cpp", _measure_llamacpp(bench, bench.llamacpp_venv, windows)


def _measure(bench: PerplexityBench, variant: Variant, windows: Windows) -> float:
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    with LLM(
        bench.model,
        dtype=variant.dtype,
        quantize=variant.quantize,
        quantize_importance=variant.quantize_importance,
        kv_cache_dtype=variant.kv_cache_dtype,
        activation_dtype=variant.activation_dtype,
        max_model_len=bench.window + 1,
        max_num_seqs=WINDOWS_PER_CALL,
        num_threads=bench.num_threads,
        show_progress=False,
    ) as llm:
        return math.fsum(
            negative_log_likelihood(completion.prompt_logprobs)
            for start in range(0, len(windows), WINDOWS_PER_CALL)
            for completion in llm.generate(windows[start : start + WINDOWS_PER_CALL], sampling)
        )


def _measure_llamacpp(bench: PerplexityBench, venv: Path, windows: Windows) -> float:
    path = open_checkpoint(bench.model).path
    settings = {"model": str(path), "num_threads": bench.num_threads, "windows": windows}
    with tempfile.TemporaryFile("w+") as log, tempfile.NamedTemporaryFile("w") as file:
        json.dump(settings, file)
        file.flush()
        with external_process(
            [str(python_of(venv)), str(WORKER), file.name],
            clean_environment(),
            stdout=subprocess.PIPE,
            stderr=log.fileno(),
        ) as process:
            written, _ = process.communicate()
        if process.returncode:
            log.seek(0)
            last = (log.read().strip().splitlines() or ["no message"])[-1]
            raise InvalidConfig(f"llama.cpp cannot score {path}: {last}")
    return float(written)
