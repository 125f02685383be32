"""Chats to which requests of other APIs are translated. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from baton.router.parts import Part, content_of
from baton.router.values import ChatMessage

# Baton's own fields of chats that requests of other APIs can have.
BATON_FIELDS = (
    *("seed", "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos"),
    *("stop_token_ids", "priority", "cache_salt", "kv_hints", "chat_template_kwargs"),
)
# Variables of chat templates that turn thinking on: of Qwen and GLM, of DeepSeek and Granite.
THINKING_VARIABLES = ("enable_thinking", "thinking")


@dataclass(slots=True)
class _OpenTurn:
    role: str
    parts: list[Part] = field(default_factory=list)
    others: dict[str, Any] = field(default_factory=dict)


class ChatTurns:
    """Builds the messages of a chat. Successive messages of one role become one message."""

    def __init__(self) -> None:
        self._turns: list[_OpenTurn] = []
        self._name_by_call: dict[str, str] = {}

    @property
    def roles(self) -> list[str]:
        return [turn.role for turn in self._turns]

    @property
    def messages(self) -> list[ChatMessage]:
        return [ChatMessage(turn.role, content_of(turn.parts), turn.others) for turn in self._turns]

    def add(self, role: str, part: Part) -> None:
        self._turn(role).parts.append(part)

    def add_reasoning(self, text: str) -> None:
        others = self._turn("assistant").others
        others["reasoning_content"] = others.get("reasoning_content", "") + text

    def add_call(self, call_id: str, name: str, arguments: object) -> None:
        self._name_by_call[call_id] = name
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._turn("assistant").others.setdefault("tool_calls", []).append(call)

    def has_call(self, call_id: str) -> bool:
        return call_id in self._name_by_call

    def add_result(self, call_id: str, parts: list[Part], *, is_error: bool = False) -> None:
        name = self._name_by_call.get(call_id)
        others = {
            "tool_call_id": call_id,
            **({} if name is None else {"name": name}),
            **({"is_error": True} if is_error else {}),
        }
        self._turns.append(_OpenTurn("tool", parts, others))

    def _turn(self, role: str) -> _OpenTurn:
        """Return the last message, or a new one if it is of another role."""
        if not self._turns or self._turns[-1].role != role:
            self._turns.append(_OpenTurn(role))
        return self._turns[-1]


def with_thinking(variables: object, *, is_on: bool) -> object:
    """Add the variables that turn thinking on or off, unless the client sets them."""
    if not isinstance(variables, dict):
        return variables
    return {**dict.fromkeys(THINKING_VARIABLES, is_on), **variables}


def with_retain_s(hints: object, retain_s: int) -> object:
    """Add the time to retain KV, unless the client's own hints say otherwise."""
    if not isinstance(hints, dict) or not retain_s or hints.get("release"):
        return hints
    return {"retain_s": float(retain_s), **hints}
