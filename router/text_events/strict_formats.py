"""Texts around the arguments of calls that a strict tool constrains, by format. Pure.

The arguments follow the tool's schema from the trigger on: as JSON, between tags, or in the
format's own notation of values.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from keyword import iskeyword
from typing import Any

from baton.router.text_events.formats import command, harmony, pythonic_calls, tagged_calls

_VARIABLE = re.compile(r"\$(number|id)")
_NAME = re.compile(r"\$(?:name|quoted|escaped)")
Texts = Sequence[str]  # of which the model chooses one


@dataclass(frozen=True, slots=True)
class StrictCalls:
    """Calls of one notation: trigger, begin, calls with separators between them, end.

    `call` is the text before the arguments, in parts if the model chooses among some texts. It has
    `$name`, `$quoted` (the name as JSON) or `$escaped` (as in HTML), and `$number` and `$id`, which
    the model chooses.
    """

    trigger: str  # empty: the calls are the whole answer
    call: str | Sequence[str | Texts]
    call_end: str = ""
    begin: str = ""
    separator: str | None = None  # None: each call has its trigger
    end: str = ""
    parameter: Mapping[str, Any] | None = None  # tags of one argument
    literals: Any = None  # notation of the values; without both, arguments are JSON
    texts: Texts = ()  # begins of texts between calls
    stops: Texts = ()  # ends of these texts and of calls

    def section(self, names: Sequence[str]) -> dict[str, Any]:
        """Return a section of a structural tag, for functions by the index of their schemas."""
        structures: list[dict[str, Any]] = [
            {"begin": list(self._begin(name)), "schema_index": index, "end": self.call_end}
            for index, name in enumerate(names)
        ]
        structures += [{"begin": text, "text": True} for text in self.texts]
        texts = {"trigger": self.trigger, "begin": self.begin, "end": self.end}
        optional = {
            "separator": self.separator,
            "parameter": self.parameter,
            "literals": self.literals,
            "stops": list(self.stops) or None,
        }
        given = {key: value for key, value in optional.items() if value is not None}
        return {**texts, **given, "structures": structures}

    def _begin(self, name: str) -> Iterator[Any]:
        """Split the text at what the model chooses, and insert the name."""
        names = {
            "$quoted": json.dumps(name, ensure_ascii=False),
            "$escaped": html.escape(name),
            "$name": name,
        }
        for part in [self.call] if isinstance(self.call, str) else self.call:
            if not isinstance(part, str):
                yield {"any": list(part)}
                continue
            for index, text in enumerate(_VARIABLE.split(part)):
                yield {"any": text} if index % 2 else _NAME.sub(lambda found: names[found[0]], text)


def _any_name(_name: str) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class StrictFormat:
    """Notations of a format, and what its free text can be."""

    notations: Sequence[StrictCalls]
    marks: Texts = ()  # texts with special tokens that are no calls
    never: Sequence[str | Sequence[Any]] = ()  # in free text; in parts, with patterns
    begins: Sequence[str | Sequence[Any]] = ()  # of calls that are the whole answer
    can_call: Callable[[str], bool] = _any_name  # a function of this name

    def structural_tag(self, functions: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        """Return the constraint of an answer, for functions with schemas of their arguments."""
        names, schemas = zip(*functions, strict=True)
        sections = [each.section(names) for each in self.notations]
        text = {"marks": self.marks, "never": self.never, "begins": self.begins}
        given = {key: list(value) for key, value in text.items() if value}
        tag = {"sections": sections, "schemas": schemas}
        return {**tag, "text": given} if given else tag


def _calls(*args: Any, **fields: Any) -> StrictFormat:
    return StrictFormat((StrictCalls(*args, **fields),))


def _objects(trigger: str, key: str = "arguments", **around: Any) -> StrictCalls:
    return StrictCalls(trigger, f'{{"name": $quoted, "{key}": ', "}", **around)


def _is_word(name: str) -> bool:
    return re.fullmatch(r"[\w./:-]+", name) is not None


def _is_python_name(name: str) -> bool:
    parts = name.split(".")
    return name.isascii() and all(part.isidentifier() and not iskeyword(part) for part in parts)


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
_MINIMAX_CALL = ' name="$escaped">\n'
_MINIMAX: Mapping[str, Any] = {
    "call_end": "</invoke>",
    "parameter": {
        "begin": '<parameter name="$escaped">',
        "end": "</parameter>\n",
        "never": ["</parameter>"],
    },
}
_LLAMA = StrictFormat(
    (_objects("", key="parameters", separator="; "),), never=("<|python_tag|>",), begins=("{",)
)
_DEEPSEEK, _DEEPSEEK_CALL = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"

_SPACE, _IDENTIFIER = {"any": "space"}, {"any": "name"}
_CHANNELS = tuple(f"{harmony.CHANNEL}{each}" for each in ("commentary", "analysis"))
_CONTENT_TYPES = tuple(
    f"{each}{harmony.MESSAGE}"
    for each in (" <|constrain|>json", "<|constrain|>json", " json", " code", "")
)
_HARMONY = StrictCalls(
    "",
    (
        # The recipient is next to the role or to the channel.
        (" to=functions.", *(f"{each} to=functions." for each in _CHANNELS)),
        "$name",
        tuple(f"{each}{kind}" for each in (*_CHANNELS, "") for kind in _CONTENT_TYPES),
    ),
    separator=f"{harmony.START}assistant",
    texts=tuple(f"{each}{harmony.MESSAGE}" for each in (*_CHANNELS, f"{harmony.CHANNEL}final")),
    stops=harmony.ENDS,
)


def _dsml(section: str, space: str = "") -> StrictFormat:
    begin, end = f"<｜DSML｜{space}", f"</｜DSML｜{space}"
    name = f'{begin}parameter name="$escaped" string='
    tags: Mapping[str, Any] = {
        "parameter": {
            "begin": f'{name}"true">',
            "json": [f'{name}"false">'],
            "end": f"{end}parameter>\n",
            "never": [f"{end}parameter>"],
        }
    }
    call, call_end = ' name="$escaped">\n', f"{end}invoke>"
    return StrictFormat(
        (
            StrictCalls(
                f"{begin}{section}>",
                f"\n{begin}invoke{call}",
                call_end,
                separator="",
                end=f"\n{end}{section}>",
                **tags,
            ),
            StrictCalls(f"{begin}invoke", call, call_end, **tags),
        )
    )


_KIMI_ARGUMENT = '<|open|>argument key="$escaped" type="'
_KIMI_CALL = ' tool="$escaped" index="$number"<|sep|>'
_KIMI: Mapping[str, Any] = {
    "call_end": "<|close|>call<|sep|>",
    "parameter": {
        "begin": f'{_KIMI_ARGUMENT}string"<|sep|>',
        "json": [
            _KIMI_ARGUMENT,
            {"any": ["number", "boolean", "null", "object", "array"]},
            '"<|sep|>',
        ],
        "end": "<|close|>argument<|sep|>",
    },
}


def _python_list(begin: str = "", end: str = "") -> StrictCalls:
    around: Any = {"begin": f"{begin}[", "separator": ", ", "end": f"]{end}"}
    return StrictCalls("", "$name(", ")", literals="python", **around)


def _marked_list(begin: str, end: str) -> StrictCalls:
    around: Any = {"begin": "[", "separator": ", ", "end": f"]{end}"}
    return StrictCalls(begin, "$name(", ")", literals="python", **around)


_PYTHON_START, _PYTHON_END = pythonic_calls.MARKS
_PYTHONIC = StrictFormat(
    (_python_list(), _python_list(_PYTHON_START, _PYTHON_END)),
    begins=tuple(
        (*start, "[", _SPACE, _IDENTIFIER, _SPACE, "(") for start in ((), (_PYTHON_START, _SPACE))
    ),
    can_call=_is_python_name,
)


def _gemma(begin: str, end: str, quote: str) -> StrictFormat:
    calls = StrictCalls(begin, "call:$name", end, literals={"quote": quote})
    return StrictFormat((calls,), can_call=_is_word)


STRICT_FORMATS: Mapping[str, StrictFormat] = {
    "hermes": StrictFormat((_objects("<tool_call>", begin="\n", end="\n</tool_call>"),)),
    "qwen3_xml": StrictFormat(
        (
            StrictCalls(
                "<tool_call>",
                "\n<function=$name>\n",
                "</function>\n</tool_call>",
                parameter=_QWEN_PARAMETER,
            ),
            StrictCalls("<function=", "$name>\n", "</function>", parameter=_QWEN_PARAMETER),
        )
    ),
    "glm45": _calls("<tool_call>", "$name\n", "</tool_call>", parameter=_GLM_PARAMETER),
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "mistral": StrictFormat(
        (
            StrictCalls("[TOOL_CALLS]", "$name[ARGS]"),
            StrictCalls("[TOOL_CALLS]", "$name[CALL_ID]$id[ARGS]"),
            _objects("[TOOL_CALLS]", begin="[", separator=", ", end="]"),
        )
    ),
    "deepseek_v3": _calls(
        _DEEPSEEK,
        f"{_DEEPSEEK_CALL}function<｜tool▁sep｜>$name\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        separator="\n",
        end="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": _calls(
        _DEEPSEEK,
        f"{_DEEPSEEK_CALL}$name<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        separator="",
        end="<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": _calls(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.$name:$number<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        separator="",
        end="<|tool_calls_section_end|>",
    ),
    "cohere_cmd": StrictFormat(
        (
            StrictCalls(
                "<|START_ACTION|>",
                '{"tool_call_id": "$number", "tool_name": $quoted, "parameters": ',
                "}",
                begin="[\n    ",
                separator=",\n    ",
                end="\n]<|END_ACTION|>",
            ),
        ),
        marks=tuple(command.COMMAND.others),
    ),
    "granite": StrictFormat(
        tuple(
            _objects(mark, begin="[", separator=", ", end="]")
            for mark in ("<|tool_call|>", "<tool_call>")
        )
    ),
    "nemotron_json": StrictFormat(
        (_objects("<TOOLCALL>", begin="[", separator=", ", end="]</TOOLCALL>"),)
    ),
    "phi4_mini_json": StrictFormat(
        (
            _objects("functools[", separator=", ", end="]"),
            _objects("<|tool_call|>", begin="[", separator=", ", end="]<|/tool_call|>"),
        ),
        never=(("functools", _SPACE, {"any": ["[", "{"]}),),
    ),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "deepseek_v41": _dsml("calls", " "),
    "kimi_k3": StrictFormat(
        (
            StrictCalls(
                "<|open|>tools<|sep|>",
                f"<|open|>call{_KIMI_CALL}",
                separator="",
                end="<|close|>tools<|sep|>",
                **_KIMI,
            ),
            StrictCalls("<|open|>call", _KIMI_CALL, **_KIMI),
        ),
        marks=tagged_calls.KIMI_K3.outside,
    ),
    "minimax_m2": StrictFormat(
        (
            StrictCalls(
                "<minimax:tool_call>",
                f"\n<invoke{_MINIMAX_CALL}",
                separator="",
                end="\n</minimax:tool_call>",
                **_MINIMAX,
            ),
            StrictCalls("<invoke", _MINIMAX_CALL, **_MINIMAX),
        )
    ),
    "lfm2": StrictFormat(
        (_marked_list("<|tool_call_start|>", "<|tool_call_end|>"),), can_call=_is_python_name
    ),
    "openai": StrictFormat(
        (_HARMONY,), never=harmony.MARKS, begins=("to=functions.",), can_call=_is_word
    ),
    "pythonic": _PYTHONIC,
    "llama4_pythonic": _PYTHONIC,
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
}
