"""Structured-output benchmark: compilation, mask per token, mask application to a batch.

Times are CPU time of the working thread. Answers are random walks: each token is drawn from the
allowed ones, and the end token only if no other is allowed.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from time import thread_time
from typing import Any

import numpy as np
import torch

from baton.checkpoint.hub import open_checkpoint
from baton.core.ids import RequestId
from baton.core.sampling import SamplingParams
from baton.core.structured_outputs import StructuredOutputs
from baton.engine.plan import PlanRow
from baton.engine.runner.device.step_inputs import SHARED_INPUTS
from baton.engine.runner.families.read_config import read_model_config
from baton.engine.runner.model.pass_layout import TokenRun
from baton.engine.runner.sampling.sampling import SampledRows
from baton.engine.runner.sampling.torch_sampling import TORCH_SAMPLING
from baton.engine.structured_output.grammar import Bits, Grammar, num_words
from baton.engine.structured_output.llguidance_backend import GrammarLibrary

NUM_TIMES_APPLIED = 50


@dataclass(frozen=True, slots=True)
class FormBench:
    """Settings of the benchmark."""

    model: str
    num_runs: int = 5
    num_tokens: int = 300  # maximum length of a walk
    batch_sizes: tuple[int, ...] = (1, 16, 64)


@dataclass(frozen=True, slots=True)
class FormCost:
    form: str
    compile_ms: float  # with the first mask; median of the runs
    num_tokens: int
    mask_p50_us: float  # one row: advance by the last token, fill the mask
    mask_p99_us: float
    mask_max_us: float


@dataclass(frozen=True, slots=True)
class ApplyCost:
    num_rows: int
    us_per_step: float  # all rows: unpack bits, copy and mask logits


def _object(properties: Mapping[str, Any], *, needed: bool = True) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if needed else [],
        "additionalProperties": False,
    }


PERSON = _object(
    {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 5},
        "home": _object(
            {"street": {"type": "string"}, "zip": {"type": "string", "pattern": r"^\d{5}$"}}
        ),
    }
)
TEXT = {"type": ["string", "null"]}
FORMS: Mapping[str, StructuredOutputs] = {
    "json: 6 fields": StructuredOutputs(json=json.dumps(PERSON)),
    "json: any object": StructuredOutputs(json_object=True),
    "json: 500 required": StructuredOutputs(
        json=json.dumps(_object({f"field{n}": TEXT for n in range(500)}))
    ),
    "json: 500 optional": StructuredOutputs(
        json=json.dumps(_object({f"field{n}": TEXT for n in range(500)}, needed=False))
    ),
    "json: enum of 2000": StructuredOutputs(
        json=json.dumps({"enum": [f"value {n * 7919 % 10007}" for n in range(2000)]})
    ),
    "regex: address": StructuredOutputs(regex=r"[a-z0-9.]{3,30}@[a-z0-9]{3,30}\.(com|org|net)"),
    "choice of 100": StructuredOutputs(choice=tuple(f"choice {n}" for n in range(100))),
    "grammar: sums": StructuredOutputs(
        grammar='start: sum\nsum: term (("+" | "-") term)*\nterm: N | "(" sum ")"\nN: /[0-9]{1,9}/'
    ),
}


def run(bench: FormBench, on_done: Callable[[str], None]) -> tuple[list[FormCost], list[ApplyCost]]:
    checkpoint = open_checkpoint(bench.model)
    vocab_size = read_model_config(checkpoint).vocab_size
    eos_token_ids = checkpoint.read_generation_defaults().eos_token_ids
    library = GrammarLibrary(checkpoint, vocab_size, eos_token_ids)
    library.compile(StructuredOutputs(regex=""))  # warm-up: loads the tokenizer
    costs = []
    for name, form in FORMS.items():
        costs.append(_cost(bench, name, form, library, vocab_size, frozenset(eos_token_ids)))
        on_done(name)
    return costs, [_apply_cost(size, vocab_size) for size in bench.batch_sizes]


def _cost(
    bench: FormBench,
    name: str,
    form: StructuredOutputs,
    library: GrammarLibrary,
    vocab_size: int,
    eos_token_ids: frozenset[int],
) -> FormCost:
    compile_s, mask_s = [], []
    for seed in range(bench.num_runs):
        began_s = thread_time()
        grammar = library.compile(form)
        compile_s.append(thread_time() - began_s)
        walk = _walk(grammar, vocab_size, eos_token_ids, bench.num_tokens, random.Random(seed))
        mask_s += list(walk)
    mask_us = sorted(1e6 * seconds for seconds in mask_s)
    return FormCost(
        form=name,
        compile_ms=1e3 * statistics.median(compile_s),
        num_tokens=len(mask_us),
        mask_p50_us=mask_us[len(mask_us) // 2],
        mask_p99_us=mask_us[len(mask_us) * 99 // 100],
        mask_max_us=mask_us[-1],
    )


def _walk(
    grammar: Grammar,
    vocab_size: int,
    eos_token_ids: frozenset[int],
    num_tokens: int,
    chance: random.Random,
) -> Iterator[float]:
    """Yield the seconds of each token."""
    matcher, bits = grammar.matcher(), np.zeros(num_words(vocab_size), dtype=np.int32)
    last: list[int] = []
    for _ in range(num_tokens):
        began_s = thread_time()
        matcher.advance(last)
        matcher.fill(bits)
        yield thread_time() - began_s
        others = [token for token in _allowed(bits) if token not in eos_token_ids]
        if not others:
            return
        last = [chance.choice(others)]


def _allowed(bits: Bits) -> list[int]:
    found: list[int] = np.flatnonzero(
        np.unpackbits(bits.view(np.uint8), bitorder="little")
    ).tolist()
    return found


def _apply_cost(num_rows: int, vocab_size: int) -> ApplyCost:
    logits = torch.randn(num_rows, vocab_size)
    bits = np.full((num_rows, num_words(vocab_size)), 0x55555555, dtype=np.int32)
    row = PlanRow(RequestId("masked"), (0,), 1, 0, ((),), SamplingParams(), 0)
    known = np.zeros(1, dtype=np.int64)
    took_s = []
    for _ in range(NUM_TIMES_APPLIED):
        began_s = thread_time()
        runs = [TokenRun(row, 0, 1, len(known), known, mask) for mask in bits]
        rows = SampledRows(runs, (), vocab_size, logits.device)
        TORCH_SAMPLING.begin(rows, SHARED_INPUTS).constrain(logits)
        took_s.append(thread_time() - began_s)
    return ApplyCost(num_rows, 1e6 * statistics.median(took_s))
