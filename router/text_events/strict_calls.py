"""Texts around the arguments of calls that a strict tool constrains, by format. Pure.

A format is here if its arguments are JSON between texts that do not vary, or stand between tags.
The arguments follow the tool's schema from the trigger on. Not here: tags that special tokens are a
part of (DeepSeek from V3.2 on, Kimi K3), Python's and Gemma's notations, and Harmony, whose calls
begin as other messages do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_VARIABLE = re.compile(r"\$(number|id)")


@dataclass(frozen=True, slots=True)
class StrictCalls:
    """Calls of one notation: trigger, begin, calls with separators between them, end.

    `call` is the text before the arguments, with `$name`, `$quoted` (the name as JSON), and
    `$number` and `$id`, which the model chooses.
    """

    trigger: str  # empty: the calls are the whole answer
    call: str
    call_end: str
    begin: str = ""
    separator: str | None = None  # None: each call has its trigger
    end: str = ""
    parameter: Mapping[str, Any] | None = None  # tags of one argument; None: JSON

    def section(self, functions: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        """Return a section of a structural tag, for functions with schemas of their arguments."""
        separator = {} if self.separator is None else {"separator": self.separator}
        structures = [
            {"begin": self._begin(name), "schema": schema, "end": self.call_end}
            for name, schema in functions
        ]
        texts = {"trigger": self.trigger, "begin": self.begin, "end": self.end}
        tags = {} if self.parameter is None else {"parameter": self.parameter}
        return {**texts, **separator, **tags, "structures": structures}

    def _begin(self, name: str) -> list[Any]:
        """Split the text at what the model chooses, and insert the name."""
        quoted = json.dumps(name, ensure_ascii=False)
        return [
            {"any": part} if index % 2 else part.replace("$quoted", quoted).replace("$name", name)
            for index, part in enumerate(_VARIABLE.split(self.call))
        ]


def _objects(trigger: str, key: str = "arguments", **around: Any) -> StrictCalls:
    return StrictCalls(trigger, f'{{"name": $quoted, "{key}": ', "}", **around)


_QWEN_PARAMETER = {
    "begin": "<parameter=$name>\n",
    "end": "\n</parameter>\n",
    "never": ["</parameter>", "\n<parameter=", "\n</function>"],
}
_GLM_PARAMETER = {
    "begin": "<arg_key>$name</arg_key>\n<arg_value>",
    "end": "</arg_value>\n",
    "never": ["</arg_value>", "</tool_call>"],
}
_LLAMA = (_objects("", key="parameters", separator="; "),)
_DEEPSEEK, _DEEPSEEK_CALL = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"

STRICT_CALLS: Mapping[str, tuple[StrictCalls, ...]] = {
    "hermes": (_objects("<tool_call>", begin="\n", end="\n</tool_call>"),),
    "qwen3_xml": (
        StrictCalls(
            "<tool_call>",
            "\n<function=$name>\n",
            "</function>\n</tool_call>",
            parameter=_QWEN_PARAMETER,
        ),
    ),
    "glm45": (StrictCalls("<tool_call>", "$name\n", "</tool_call>", parameter=_GLM_PARAMETER),),
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "mistral": (
        StrictCalls("[TOOL_CALLS]", "$name[ARGS]", ""),
        StrictCalls("[TOOL_CALLS]", "$name[CALL_ID]$id[ARGS]", ""),
        _objects("[TOOL_CALLS]", begin="[", separator=", ", end="]"),
    ),
    "deepseek_v3": (
        StrictCalls(
            _DEEPSEEK,
            f"{_DEEPSEEK_CALL}function<｜tool▁sep｜>$name\n```json\n",
            "\n```<｜tool▁call▁end｜>",
            separator="\n",
            end="<｜tool▁calls▁end｜>",
        ),
    ),
    "deepseek_v31": (
        StrictCalls(
            _DEEPSEEK,
            f"{_DEEPSEEK_CALL}$name<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            separator="",
            end="<｜tool▁calls▁end｜>",
        ),
    ),
    "kimi_k2": (
        StrictCalls(
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>functions.$name:$number<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            separator="",
            end="<|tool_calls_section_end|>",
        ),
    ),
    "granite": tuple(
        _objects(mark, begin="[", separator=", ", end="]")
        for mark in ("<|tool_call|>", "<tool_call>")
    ),
    "phi4_mini_json": (
        _objects("functools[", separator=", ", end="]"),
        _objects("<|tool_call|>", begin="[", separator=", ", end="]<|/tool_call|>"),
    ),
}
