"""Formats of answers: their parsers, and the chat templates of models that write them. Pure.

Names are vLLM's. A new format is a row here, and a script in `formats/` if none fits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baton.router.text_events.call_writer import CallWriter
from baton.router.text_events.formats import command, harmony, pythonic_calls, tagged_calls
from baton.router.text_events.formats.argument_types import ArgumentTypes
from baton.router.text_events.formats.gemma_calls import GemmaCalls
from baton.router.text_events.formats.json_calls import (
    PYTHON_TAG,
    MarkedObjects,
    read_llama_calls,
)
from baton.router.text_events.formats.named_calls import NamedCalls, read_mistral_calls
from baton.router.text_events.script_parser import TextBuffer, Waiting
from baton.router.values import Parsing, ReasoningMarks

Script = Callable[[TextBuffer, CallWriter], Waiting[None]]
NONE, AUTO = "none", "auto"  # names of options: no parser, and the one of the chat template


@dataclass(frozen=True, slots=True)
class ToolFormat:
    script: Callable[[ArgumentTypes], Script]
    marks: tuple[str, ...] = ()  # that may be special tokens


def _always(script: Script) -> Callable[[ArgumentTypes], Script]:
    return lambda _types: script


def _tags(tags: tagged_calls.CallTags) -> ToolFormat:
    return ToolFormat(lambda types: tagged_calls.TaggedCalls(tags, types), tags.marks)


def _objects(*begins: str, end: str = "") -> ToolFormat:
    return ToolFormat(_always(MarkedObjects(begins, end)), (*begins, *([end] if end else ())))


def _named(calls: NamedCalls) -> ToolFormat:
    marks = (*(calls.section or ()), calls.begin, *calls.separators, *calls.ends)
    return ToolFormat(_always(calls), marks)


def _gemma(begin: str, end: str, quote: str) -> ToolFormat:
    calls = GemmaCalls(begin, end, quote)
    return ToolFormat(_always(calls), calls.marks)


def _deepseek(separator: str, end: str, name: Callable[[str], str]) -> NamedCalls:
    """Calls of DeepSeek before V3.2. `separator` and `end` are next to the arguments."""
    return NamedCalls(
        begin="<｜tool▁call▁begin｜>",
        separators=(separator,),
        ends=(f"{end}<｜tool▁call▁end｜>",),
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        name=name,
    )


_LLAMA = ToolFormat(_always(read_llama_calls), (PYTHON_TAG,))
_LFM2 = pythonic_calls.MarkedLists("<|tool_call_start|>", "<|tool_call_end|>")
_PYTHONIC = ToolFormat(_always(pythonic_calls.read_pythonic_calls), pythonic_calls.MARKS)

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": _objects("<tool_call>", end="</tool_call>"),
    "qwen3_xml": _tags(tagged_calls.QWEN),
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "pythonic": _PYTHONIC,
    "llama4_pythonic": _PYTHONIC,
    "lfm2": ToolFormat(_always(_LFM2), (_LFM2.begin, _LFM2.end)),
    "mistral": ToolFormat(_always(read_mistral_calls), ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    "deepseek_v3": _named(
        _deepseek("\n```json\n", "```", lambda text: text.removeprefix("function<｜tool▁sep｜>"))
    ),
    "deepseek_v31": _named(_deepseek("<｜tool▁sep｜>", "", str.strip)),
    "deepseek_v32": _tags(tagged_calls.dsml_tags("function_calls")),
    "deepseek_v4": _tags(tagged_calls.dsml_tags("tool_calls")),
    "deepseek_v41": _tags(tagged_calls.dsml_tags("calls", space=" ")),
    "glm45": _tags(tagged_calls.GLM),
    "minimax_m2": _tags(tagged_calls.MINIMAX),
    "kimi_k3": _tags(tagged_calls.KIMI_K3),
    "kimi_k2": _named(
        NamedCalls(
            begin="<|tool_call_begin|>",
            separators=("<|tool_call_argument_begin|>",),
            ends=("<|tool_call_end|>",),
            section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            name=lambda text: re.sub(r"^functions\.|:\d+$", "", text.strip()),
        )
    ),
    "openai": ToolFormat(_always(harmony.read_harmony), harmony.MARKS),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "cohere_cmd": ToolFormat(_always(command.COMMAND), command.MARKS),
    "granite": _objects("<|tool_call|>", "<tool_call>"),
    "nemotron_json": _objects("<TOOLCALL>", end="</TOOLCALL>"),
    "phi4_mini_json": _objects("functools", "<|tool_call|>", end="<|/tool_call|>"),
}

_THINK = ReasoningMarks("<think>", "</think>")
REASONING_FORMATS: Mapping[str, ReasoningMarks] = {
    "qwen3": ReasoningMarks("<think>", "</think>", next_tags=("<tool_call>\n<function=",)),
    "deepseek_r1": ReasoningMarks("<think>", "</think>", is_always_open=True),
    "deepseek_v3": _THINK,
    "glm45": _THINK,
    "kimi_k2": ReasoningMarks("<think>", "</think>", next_tags=("<|tool_calls_section_begin|>",)),
    "kimi_k3": ReasoningMarks(
        "<|open|>think<|sep|>", "<|close|>think<|sep|>", next_tags=("<|open|>response<|sep|>",)
    ),
    "minimax_m2": ReasoningMarks("<think>", "</think>", next_tags=("<minimax:tool_call>",)),
    "mistral": ReasoningMarks("[THINK]", "[/THINK]"),
    "openai_gptoss": ReasoningMarks(
        harmony.CHANNEL, f"{harmony.CHANNEL}final{harmony.MESSAGE}", tool_format="openai"
    ),
    "cohere_cmd": ReasoningMarks(*command.THINKING, tool_format="cohere_cmd"),
    "gemma4": ReasoningMarks("<|channel>thought\n", "<channel|>"),
    "granite": ReasoningMarks("Here is my thought process:", "Here is my response:"),
}

# Texts that a chat template must have, the most specific first. Qwen 3 Coder has Hermes' tags, too.
_TOOLS_BY_TEMPLATE: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai", ("<|channel|>analysis", "<|start|>")),
    ("deepseek_v41", ("<｜DSML｜ calls>",)),
    ("deepseek_v4", ("<｜DSML｜tool_calls>",)),
    ("deepseek_v32", ("｜DSML｜",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("kimi_k3", ("<|open|>", "<|sep|>")),
    ("glm45", ("<arg_key>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("qwen3_xml", ("<tool_call>", "<function=", "<parameter=")),
    ("gemma4", ("<|tool_call>call:",)),
    ("functiongemma", ("<start_function_call>",)),
    ("cohere_cmd", ("<|START_ACTION|>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("lfm2", ("<|tool_list_start|>",)),
    ("lfm2", ("List of tools: [", "<|im_start|>")),
    ("granite", ("<|tool_call|>", "<|start_of_role|>")),
    ("granite", ("<|start_of_role|>", "assistant_tool_call")),
    ("nemotron_json", ("<TOOLCALL>", "</TOOLCALL>")),
    ("phi4_mini_json", ("<|tool|>", "<|/tool|>")),
    ("hermes", ("<tool_call>", "</tool_call>")),
    ("llama4_pythonic", ("<|header_start|>", "func_name1(")),
    ("pythonic", ("<|start_header_id|>", "func_name1(")),
    ("llama4_json", ("<|header_start|>", "tools")),
    ("llama3_json", ("<|start_header_id|>", "tools")),
)
_REASONING_BY_TEMPLATE: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai_gptoss", ("<|channel|>analysis", "<|start|>")),
    ("gemma4", ("<|channel>thought",)),
    ("cohere_cmd", ("<|START_RESPONSE|>",)),
    ("cohere_cmd", ("<|START_THINKING|>",)),
    ("mistral", ("[THINK]",)),
    ("granite", ("Here is my thought process:",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>", "<think>")),
    ("kimi_k3", ("<|open|>", "<|sep|>")),
    ("glm45", ("<arg_key>", "<think>")),
    ("minimax_m2", ("<minimax:tool_call>", "<think>")),
    ("deepseek_r1", ("<｜Assistant｜><think>",)),
    ("deepseek_v3", ("<｜Assistant｜>", "</think>")),
    ("qwen3", ("<think>", "</think>")),
)


def parsing_of_template(template: str) -> Parsing:
    """Return the formats of the models that have a chat template; empty ones if it has none."""
    return Parsing(_first(_TOOLS_BY_TEMPLATE, template), _first(_REASONING_BY_TEMPLATE, template))


def _first(rows: tuple[tuple[str, tuple[str, ...]], ...], template: str) -> str:
    return next((name for name, texts in rows if all(text in template for text in texts)), "")
