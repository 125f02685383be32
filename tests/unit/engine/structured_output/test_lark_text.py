"""Lark grammars with costly operators or schemas are refused."""

from __future__ import annotations

import pytest

from baton.core.errors import InvalidRequest
from baton.core.structured_outputs import StructuredOutputs
from baton.engine.structured_output.grammar_text import reason_to_refuse
from baton.engine.structured_output.llguidance_backend import validate_grammar


@pytest.mark.parametrize(
    "text",
    [
        'start: "%json {" /%json {/ // %json {\n',
        'start: T ~ 3..5\nT: "~" /a&b/ # & ~\n',
        'start: S\nS: %regex {"substring_chars": "&~%json"}',
        "start: ;; nothing of ours",
    ],
)
def test_texts_comments_and_repetitions_are_passed_on(text: str) -> None:
    assert reason_to_refuse(text) is None


NO_SCHEMA = "a schema in a grammar is not supported: send it as json"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("start: X\nX: /a/ & /b/", "line 2: the operator & of expressions"),
        ("start: X\nX: ~/a/", "line 2: the operator ~ of expressions"),
        ('start: X\nX: "a" ~ # 3\n', "line 2: the operator ~ of expressions"),
        ("start: %lark { start: X\nX: Y & Z }", "line 2: the operator & of expressions"),
        ('start: S\nS: %regex {"substring_chars": "a"} & /b/', "line 2: the operator &"),
        ("start: %json", f"line 1: {NO_SCHEMA}"),
        ('start: "a"\nb: %json {"a": {}}', f"line 2: {NO_SCHEMA}"),
        ("start: ;; %json {}", "line 1: ';' is not Lark"),
        ('start: "a\n & b', "line 1: '\"' is not Lark"),
    ],
)
def test_what_is_not_supported_is_refused_by_line(text: str, reason: str) -> None:
    assert reason in str(reason_to_refuse(text))
    with pytest.raises(InvalidRequest, match=reason):
        validate_grammar(StructuredOutputs(grammar=text))
