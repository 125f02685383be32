"""Answers to tests of strict tools, by format.

`OTHER_CALLS` are the call `see(colour="red", age=3)` in further notations, `PLAIN` are no calls,
and `HIDDEN` would be read as calls that follow no schema.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

OTHER_CALLS: Mapping[str, Sequence[str]] = {
    "mistral": (
        '[TOOL_CALLS]see[CALL_ID]abcdef123[ARGS]{"colour": "red", "age": 3}',
        '[TOOL_CALLS][{"name": "see", "arguments": {"colour": "red", "age": 3}}]',
    ),
    "granite": ('<tool_call>[{"name": "see", "arguments": {"colour": "red", "age": 3}}]',),
    "phi4_mini_json": (
        '<|tool_call|>[{"name": "see", "arguments": {"colour": "red", "age": 3}}]<|/tool_call|>',
    ),
    "qwen3_xml": (
        (
            "<function=see>\n<parameter=colour>\nred\n</parameter>\n"
            "<parameter=age>\n3\n</parameter>\n</function>"
        ),
    ),
    "deepseek_v32": (
        (
            '<｜DSML｜invoke name="see">\n'
            '<｜DSML｜parameter name="colour" string="true">red</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="age" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>'
        ),
    ),
    "minimax_m2": (
        (
            '<invoke name="see">\n<parameter name="colour">red</parameter>\n'
            '<parameter name="age">3</parameter>\n</invoke>'
        ),
    ),
    "kimi_k3": (
        (
            "<|open|>response<|sep|>Hm.<|close|>response<|sep|>"
            '<|open|>call tool="see" index="2"<|sep|>'
            '<|open|>argument key="colour" type="string"<|sep|>red<|close|>argument<|sep|>'
            '<|open|>argument key="age" type="number"<|sep|>3<|close|>argument<|sep|>'
            "<|close|>call<|sep|><|close|>message<|sep|>"
        ),
    ),
    "openai": (
        ' to=functions.see<|channel|>commentary<|message|>{"colour": "red", "age": 3}',
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.see<|channel|>"
            'analysis json<|message|>{"colour": "red", "age": 3}<|call|>'
            "<|start|>assistant<|channel|>final<|message|>Seen.<|return|>"
        ),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.see code<|message|>{"colour": "red", "age": 3}<|end|>'
        ),
    ),
    "llama4_pythonic": (
        "<|python_start|>[see(colour='red', age=3)]<|python_end|>",
        '[see(colour="red",age=3)]',
    ),
}
PLAIN: Mapping[str, Sequence[str]] = {
    "cohere_cmd": ("<|START_RESPONSE|>I see.<|END_RESPONSE|>",),
    "openai": ("<|channel|>analysis<|message|>to=functions.see {<|end|>",),
    "pythonic": ("[1] see(", "[see](a link)", " [see"),
    "kimi_k3": ("<|open|>response<|sep|>I see.<|close|>response<|sep|><|close|>message<|sep|>",),
}
HIDDEN: Mapping[str, Sequence[str]] = {
    "openai": (
        " to=functions.see<|message|>{}",
        "to=functions.see",
        "x to=functions.see<|message|>{}",
        "<|channel|>final to=functions.see<|message|>{}",
        "<|channel|>analysis<|message|>x<|end|> to=functions.see<|message|>{}",
        "<|channel|>final<|message|>x<|return|> to=functions.see<|message|>{}",
        "<|start|>assistant to=browser.search<|channel|>commentary<|message|>{}",
    ),
    "pythonic": (" [see()]", "[ see()]", "\x1c[see()]", "<|python_start|> [see()]"),
    "llama3_json": (' {"name": "see", "parameters": {}}', "\x1c{"),
    "phi4_mini_json": (
        'functools [{"name": "see", "arguments": {}}]',
        'functools {"name": "see", "arguments": {}}',
    ),
    "deepseek_v4": ('<｜DSML｜invoke name="see">\n</｜DSML｜invoke>',),
}
