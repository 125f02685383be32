"""Script of a model that calls tools of agents, and reads their results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.scripted_models import make_scripted_folder

SECRET = "sesame"  # what the tools of agents have to return
RUN = f"echo opened > opened.txt; echo {SECRET[::-1]} | rev"
FOX = {"colour": "red", "is_young": True}
PICTURE = "picture.png"  # that agents are asked to look at
TEXT, THOUGHT = "The answer is four.", "Two and two."
SEEN, UNSEEN = f"The tool said {SECRET}.", "No result has arrived."
LOOKED = "I have looked at it."


def _call(name: str, arguments: Any) -> str:
    written = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{written}\n</tool_call>"


CALLS = {
    "get_weather": {"location": "San Francisco, CA"},
    "Fox": FOX,
    "Bash": {"command": RUN, "description": "Open the door"},  # Claude Code
    "exec_command": {"cmd": RUN},  # Codex
    "Read": {"file_path": PICTURE},  # Claude Code
    "view_image": {"path": PICTURE},  # Codex
}
# Calls with a wrong unit, in the formats of gpt-oss and Gemma 4.
HARMONY = (
    f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.weigh <|constrain|>json<|message|>{"place": "Rome", "unit": "stone"}'
)
GEMMA = 'I see. <|tool_call>call:weigh{place:<|"|>Rome<|"|>,unit:<|"|>pound<|"|>}<tool_call|>'
ANSWERS = {
    "<|text|>": TEXT,  # first, since later texts cannot use its tokens
    **{f"<|call {name}|>": _call(name, arguments) for name, arguments in CALLS.items()},
    "<|seen|>": SEEN,
    "<|unseen|>": UNSEEN,
    "<|looked|>": LOOKED,
    "<|json|>": json.dumps(FOX),
    "<|think|>": f"<think>\n{THOUGHT}\n</think>\n\n{TEXT}",
    "<|harmony|>": HARMONY,
    "<|gemma|>": GEMMA,
}
# The formats of Hermes and Qwen 3: calls in <tool_call>, reasoning in <think>.
CHAT_TEMPLATE = """
{%- macro text(content) -%}
{%- if content is string %}{{ content }}{% else -%}
{%- for part in content or [] %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for tool in tools or [] %}{{ tool | tojson }}\n{% endfor -%}
{%- for message in messages -%}
<|{{ message.role }}|>
{%- if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n{% endif -%}
{{ text(message.content) }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>
{%- endfor %}\n
{%- endfor -%}
{%- if add_generation_prompt -%}
{%- set names = (tools or []) | map(attribute='function.name') | list -%}
{%- set turn = (messages | rejectattr('role', 'equalto', 'system') | list)[-1] -%}
{%- set last = text(turn.content) -%}
{%- if turn.role == 'tool' -%}
{{ '<|seen|>' if 'SECRET' in last else '<|looked|>' if '<image>' in last else '<|unseen|>' }}
{%- elif 'think' in last %}<|think|>
{%- elif 'harmony' in last %}<|harmony|>
{%- elif 'gemma' in last %}<|gemma|>
{%- else -%}
{%- set looking = ['Read', 'view_image'] if 'PICTURE' in last else [] -%}
{%- set known = looking + ['get_weather', 'Fox', 'Bash', 'exec_command'] -%}
{%- set called = known | select('in', names) | first -%}
{{ '<|call ' + called + '|>' if called else '<|json|>' if 'json_schema' in last else '<|text|>' }}
{%- endif -%}
{%- endif -%}
""".replace("SECRET", SECRET).replace("PICTURE", PICTURE)


def make_agent_folder(folder: Path) -> Path:
    return make_scripted_folder(folder, ANSWERS, CHAT_TEMPLATE)
