"""Answers with tool calls, written as models of each format write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

Call = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class CallWriting:
    """Writes an answer that consists of a text and calls."""

    calls: Callable[[Sequence[Call]], str]
    has_text_before: bool = True

    def __call__(self, text: str, calls: Sequence[Call]) -> str:
        return text + self.calls(calls)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _plain(value: object) -> str:
    return value if isinstance(value, str) else _json(value)


def _object(name: str, arguments: Mapping[str, Any], key: str = "arguments") -> str:
    return _json({"name": name, key: arguments})


def _each(write: Callable[[str, Mapping[str, Any]], str], between: str = "") -> CallWriting:
    return CallWriting(lambda calls: between.join(write(*call) for call in calls))


def _hermes(name: str, arguments: Mapping[str, Any]) -> str:
    return f"<tool_call>\n{_object(name, arguments)}\n</tool_call>"


def _qwen(name: str, arguments: Mapping[str, Any]) -> str:
    parameters = (
        f"<parameter={key}>\n{_plain(value)}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{''.join(parameters)}</function>\n</tool_call>"


def _glm(name: str, arguments: Mapping[str, Any]) -> str:
    parameters = (
        f"<arg_key>{key}</arg_key>\n<arg_value>{_plain(value)}</arg_value>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{''.join(parameters)}</tool_call>"


def _dsml(section: str, space: str = "") -> CallWriting:
    begin, end = f"<｜DSML｜{space}", f"</｜DSML｜{space}"

    def one(name: str, arguments: Mapping[str, Any]) -> str:
        parameters = (
            f'{begin}parameter name="{key}" string="{_json(isinstance(value, str))}">'
            f"{_plain(value)}{end}parameter>\n"
            for key, value in arguments.items()
        )
        return f'{begin}invoke name="{name}">\n{"".join(parameters)}{end}invoke>\n'

    return CallWriting(
        lambda calls: f"{begin}{section}>\n{''.join(one(*each) for each in calls)}{end}{section}>"
    )


def _minimax(calls: Sequence[Call]) -> str:
    def one(name: str, arguments: Mapping[str, Any]) -> str:
        parameters = (
            f'<parameter name="{escape(key)}">{_plain(value)}</parameter>\n'
            for key, value in arguments.items()
        )
        return f'<invoke name="{escape(name)}">\n{"".join(parameters)}</invoke>\n'

    return f"<minimax:tool_call>\n{''.join(one(*call) for call in calls)}</minimax:tool_call>"


def _kimi_k3(calls: Sequence[Call]) -> str:
    def one(name: str, arguments: Mapping[str, Any]) -> str:
        parameters = (
            f'<|open|>argument key="{escape(key)}" type="{_kind(value)}"<|sep|>{_plain(value)}'
            "<|close|>argument<|sep|>"
            for key, value in arguments.items()
        )
        head = f'<|open|>call tool="{name}" index="1"<|sep|>'
        return f"{head}{''.join(parameters)}<|close|>call<|sep|>"

    body = "".join(one(*call) for call in calls)
    return f"<|open|>tools<|sep|>{body}<|close|>tools<|sep|><|close|>message<|sep|>"


def _kind(value: object) -> str:
    return "string" if isinstance(value, str) else "object"


def _deepseek(head: str, foot: str, prefix: str = "", between: str = "") -> CallWriting:
    def one(name: str, arguments: Mapping[str, Any]) -> str:
        return (
            f"<｜tool▁call▁begin｜>{prefix}{name}{head}{_json(arguments)}{foot}<｜tool▁call▁end｜>"
        )

    def write(calls: Sequence[Call]) -> str:
        written = between.join(one(*each) for each in calls)
        return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"

    return CallWriting(write)


def _kimi_k2(calls: Sequence[Call]) -> str:
    written = (
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>"
        f"{_json(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(written)}<|tool_calls_section_end|>"


def _pythonic(calls: Sequence[Call]) -> str:
    written = (
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    )
    return f"[{', '.join(written)}]"


def _harmony(calls: Sequence[Call]) -> str:
    head = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}"
    written = (head.format(name, _json(arguments)) for name, arguments in calls)
    return "<|call|><|start|>assistant".join(written)


def _gemma(begin: str, end: str, quote: str) -> CallWriting:
    def value_of(value: object) -> str:
        if isinstance(value, str):
            return f"{quote}{value}{quote}"
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{value_of(each)}" for key, each in value.items()) + "}"
        if isinstance(value, list):
            return f"[{','.join(map(value_of, value))}]"
        return _json(value)

    return _each(lambda name, arguments: f"{begin}call:{name}{value_of(dict(arguments))}{end}")


def _command(calls: Sequence[Call]) -> str:
    written = (
        _json({"tool_call_id": f"{index}", "tool_name": name, "parameters": arguments})
        for index, (name, arguments) in enumerate(calls)
    )
    between = ",\n    "
    return f"<|START_ACTION|>[\n    {between.join(written)}\n]<|END_ACTION|>"


def _list(begin: str, end: str = "") -> CallWriting:
    return CallWriting(lambda calls: f"{begin}[{', '.join(_object(*call) for call in calls)}]{end}")


_LLAMA = CallWriting(
    lambda calls: "; ".join(_object(*call, key="parameters") for call in calls),
    has_text_before=False,
)
_PYTHONIC = CallWriting(_pythonic, has_text_before=False)
WRITERS: Mapping[str, CallWriting] = {
    "hermes": _each(_hermes, "\n"),
    "qwen3_xml": _each(_qwen, "\n"),
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "pythonic": _PYTHONIC,
    "llama4_pythonic": _PYTHONIC,
    "mistral": _each(lambda name, arguments: f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}"),
    "deepseek_v3": _deepseek("\n```json\n", "\n```", "function<｜tool▁sep｜>", "\n"),
    "deepseek_v31": _deepseek("<｜tool▁sep｜>", ""),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "deepseek_v41": _dsml("calls", " "),
    "glm45": _each(_glm, "\n"),
    "kimi_k2": CallWriting(_kimi_k2),
    "kimi_k3": CallWriting(_kimi_k3),
    "lfm2": CallWriting(lambda calls: f"<|tool_call_start|>{_pythonic(calls)}<|tool_call_end|>"),
    "minimax_m2": CallWriting(_minimax),
    "openai": CallWriting(_harmony, has_text_before=False),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "cohere_cmd": CallWriting(_command),
    "granite": _list("<|tool_call|>"),
    "nemotron_json": _list("<TOOLCALL>", "</TOOLCALL>"),
    "phi4_mini_json": _list("functools"),
}
