"""Schemas inside of Lark grammars are enforced like others, and costly operators refused."""

from __future__ import annotations

import pytest

from baton.core.errors import InvalidRequest
from baton.core.structured_outputs import StructuredOutputs
from baton.engine.structured_output.grammar_text import grammar_text
from baton.engine.structured_output.lark_text import LarkRefused, rewrite_lark
from baton.engine.structured_output.llguidance_backend import validate_grammar


@pytest.mark.parametrize(
    ("text", "rewritten"),
    [
        ('start: %json {"a": 1} "x"', 'start: %json <{"a": 1}> "x"'),
        ('start: %json\n  {\n"a": [{}]}\ny: "x"', 'start: %json <\n\n{"a": [{}]}>\ny: "x"'),
        ("start: %json true", "start: %json <true>"),
        ('start: "%json {" /%json {/ // %json {\n', 'start: "%json {" /%json {/ // %json {\n'),
        ('start: T ~ 3..5\nT: "~" /a&b/ # & ~\n', 'start: T ~ 3..5\nT: "~" /a&b/ # & ~\n'),
        (
            'start: S\nS: %regex {"substring_chars": "&~%json"}',
            'start: S\nS: %regex {"substring_chars": "&~%json"}',
        ),
        ("start: ;; nothing of ours", "start: ;; nothing of ours"),
    ],
)
def test_only_schemas_are_rewritten(text: str, rewritten: str) -> None:
    def mark(schema: str) -> str:
        return f"<{schema.strip().replace(chr(10), '')}>"

    assert rewrite_lark(text, mark).replace("< ", "<") == rewritten


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("start: X\nX: /a/ & /b/", "line 2: the operator & of expressions"),
        ("start: X\nX: ~/a/", "line 2: the operator ~ of expressions"),
        ('start: X\nX: "a" ~ # 3\n', "line 2: the operator ~ of expressions"),
        ("start: %lark { start: X\nX: Y & Z }", "line 2: the operator & of expressions"),
        ("start: %json", "line 1: a schema in it is not JSON"),
        ('start: "a"\nb: %json {"a": }', "line 2: a schema in it is not JSON"),
        ("start: %json " + "[" * 100_000, "nested too deeply"),
        ("start: ;; %json {}", "line 1: ';' is not Lark"),
        ('start: "a\n & b', "line 1: '\"' is not Lark"),
    ],
)
def test_what_cannot_be_rewritten_is_refused(text: str, reason: str) -> None:
    with pytest.raises(LarkRefused, match=reason):
        rewrite_lark(text, lambda schema: schema)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ('{"x-guidance": {"lenient": true}, "not": {"pattern": "a.b"}}', "keyword not"),
        ('{"type": "array", "uniqueItems": true}', "keyword uniqueItems"),
        ('{"oneOf": [{"pattern": "a.b"}, {"pattern": "a.c"}]}', "no value can match two"),
        ("[1]", "this is a list"),
    ],
)
def test_an_embedded_schema_that_cannot_be_enforced_is_refused(schema: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        validate_grammar(StructuredOutputs(grammar=f'start: "x"\n | %json {schema}'))


def test_an_embedded_schema_is_rewritten_like_one_alone() -> None:
    schema = '{"oneOf": [{"const": 1}, {"const": "a"}], "if": {"const": 1}, "then": {"minimum": 0}}'
    alone = grammar_text(StructuredOutputs(json=schema))

    embedded = grammar_text(StructuredOutputs(grammar=f"start: %json {schema}"))

    assert embedded.replace("%json  {", "%json {") == alone


def test_errors_behind_a_schema_have_the_lines_of_the_client() -> None:
    grammar = 'start: %json {\n"type":\n"integer"} x\nx: ")" )'

    with pytest.raises(InvalidRequest, match="line 4"):
        validate_grammar(StructuredOutputs(grammar=grammar))
