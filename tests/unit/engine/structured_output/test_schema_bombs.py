"""Schemas made to be expensive: they cost no more than a long one, on a thread.

They are compiled, or refused by name.
"""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from time import thread_time
from typing import Any

import pytest

from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.core.errors import InvalidRequest
from baton.core.structured_outputs import StructuredOutputs
from baton.engine.structured_output.compiler import GrammarCompiler
from baton.engine.structured_output.grammar import Grammar
from baton.engine.structured_output.llguidance_backend import GrammarLibrary
from baton.router.text_events.strict_formats import STRICT_FORMATS
from tests.support.grammars import PATIENCE_S

DEMO = Path(__file__).parents[4] / "models" / "demo"
MAX_COST = 30.0  # of the long schema
MAX_TRIES = 6
TEXT = {"type": "string"}
NAMES = [f"p{number}" for number in range(40)]
EITHER = {"oneOf": [{"required": [name]} for name in NAMES[:12]]}


def doubling(keyword: str, num_levels: int) -> dict[str, Any]:
    """Return definitions each of which has the next one twice."""
    links = {
        f"d{level}": {keyword: [{"$ref": f"#/$defs/d{level + 1}"}] * 2}
        for level in range(num_levels)
    }
    return {"$defs": {**links, f"d{num_levels}": TEXT}, "$ref": "#/$defs/d0"}


def nested(num_levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = TEXT
    for _ in range(num_levels):
        schema = {"type": "array", "items": schema, "uniqueItems": True}
    return schema


def named(num_levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = TEXT
    for _ in range(num_levels):
        schema = {"propertyNames": {"enum": ["a", "b", "c"]}, "additionalProperties": schema}
    return schema


BOMBS: dict[str, Any] = {
    "anyOf doubled": doubling("anyOf", 30),
    "allOf doubled": doubling("allOf", 30),
    "oneOf doubled": doubling("oneOf", 30),
    "deep unique lists": nested(300),
    "deep names of an enum": named(40),
    "products": {"allOf": [{"anyOf": [{"required": [name]} for name in NAMES]} for _ in range(9)]},
    "negations of negations": {"not": {"not": {"not": {"not": EITHER}}}},
    "overlapping branches": {
        "type": "object",
        "properties": dict.fromkeys(NAMES, TEXT),
        "oneOf": [{"required": [one, other]} for one in NAMES[:9] for other in NAMES[:9]],
    },
    "conditions": {"allOf": [{"if": EITHER, "then": EITHER, "else": EITHER}] * 9},
    "dependencies": {"dependentRequired": dict.fromkeys(NAMES, NAMES)},
    "counted properties": {
        "properties": dict.fromkeys(NAMES, TEXT),
        "minProperties": 20,
        "maxProperties": 20,
    },
    "a unique enum": {
        "type": "array",
        "uniqueItems": True,
        "items": {"enum": list(range(20_000))},
    },
    "patterns": {"allOf": [{"pattern": f"({name}|.{{9}}){{9,99}}x"} for name in NAMES]},
    "repetitions of patterns": {
        "type": "string",
        "allOf": [{"pattern": f"^(a|bc){{{times}}}{times}?$"} for times in (40, 60, 99)],
    },
    "lengths": {"type": "string", "minLength": 10**9},
    "list lengths": {"type": "array", "items": TEXT, "minItems": 10**6},
    "remainders": {"type": "integer", "multipleOf": 9973, "minimum": -(10**18)},
    "many names": {"type": "object", "properties": {f"n{n}": TEXT for n in range(1200)}},
}


@pytest.fixture(scope="module")
def library() -> GrammarLibrary:
    return GrammarLibrary(SafetensorsFolder(DEMO), 2048, [1])


Timed = tuple[float, Grammar | InvalidRequest]
LONG = {"type": "object", "properties": {f"n{n}": TEXT for n in range(400)}}
LONG_FORM = StructuredOutputs(json=json.dumps(LONG))


@pytest.fixture(scope="module")
def compiler(library: GrammarLibrary) -> Iterator[GrammarCompiler[Timed]]:
    def compile_timed(wanted: StructuredOutputs) -> Timed:
        began_s = thread_time()
        try:
            outcome: Grammar | InvalidRequest = library.compile(wanted)
        except InvalidRequest as refusal:
            outcome = refusal
        return thread_time() - began_s, outcome

    with GrammarCompiler(compile_timed) as running:
        yield running


def as_tool(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool with one argument."""
    part = {key: value for key, value in schema.items() if key != "$defs"}
    return {"type": "object", "properties": {"x": part}, "$defs": schema.get("$defs", {})}


CALLS = [
    StructuredOutputs(
        structural_tag=json.dumps(STRICT_FORMATS[name].structural_tag([("f", as_tool(schema))]))
    )
    for schema, name in zip(BOMBS.values(), cycle(("pythonic", "gemma4", "kimi_k3")), strict=False)
]
FORMS = [*(StructuredOutputs(json=json.dumps(schema)) for schema in BOMBS.values()), *CALLS]


@pytest.mark.parametrize("wanted", FORMS, ids=[*BOMBS, *(f"{name} of a tool" for name in BOMBS)])
def test_an_expensive_schema_costs_as_much_as_a_few_long_ones_or_is_refused_by_name(
    wanted: StructuredOutputs, compiler: GrammarCompiler[Timed]
) -> None:
    cost = float("inf")
    for num_spaces in range(MAX_TRIES):  # noise can only raise the cost
        long_s, _ = compile_on_thread(with_spaces(LONG_FORM, num_spaces), compiler)
        took_s, outcome = compile_on_thread(with_spaces(wanted, num_spaces), compiler)
        cost = min(cost, took_s / long_s)
        if cost < MAX_COST:
            break

    assert cost < MAX_COST
    if isinstance(outcome, InvalidRequest):
        assert "cannot be enforced: " in str(outcome)


def with_spaces(wanted: StructuredOutputs, number: int) -> StructuredOutputs:
    """Return an equal grammar that is not in the cache."""
    end = " " * number
    if wanted.json is not None:
        return replace(wanted, json=wanted.json + end)
    return replace(wanted, structural_tag=f"{wanted.structural_tag}{end}")


def compile_on_thread(wanted: StructuredOutputs, compiler: GrammarCompiler[Timed]) -> Timed:
    results = queue.SimpleQueue[Any]()
    compiler.start(wanted, results.put)
    timed: Timed = results.get(timeout=PATIENCE_S)
    return timed
