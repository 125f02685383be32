"""Chats to which requests of other APIs are translated. Pure."""

from __future__ import annotations

from typing import Any

# Baton's own fields of chats that requests of other APIs can have.
BATON_FIELDS = (
    *("seed", "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos"),
    *("stop_token_ids", "priority", "cache_salt", "kv_hints", "chat_template_kwargs"),
)
# Variables of chat templates that turn thinking on: of Qwen and GLM, of DeepSeek and Granite.
THINKING_VARIABLES = ("enable_thinking", "thinking")


class ChatTurns:
    """Builds the messages of a chat. Successive messages of one role become one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._name_by_call: dict[str, str] = {}

    def add_text(self, role: str, text: str) -> None:
        self._turn(role)["content"].append({"type": "text", "text": text})

    def add_reasoning(self, text: str) -> None:
        turn = self._turn("assistant")
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def add_call(self, call_id: str, name: str, arguments: object) -> None:
        """`arguments` are an object, or its JSON."""
        self._name_by_call[call_id] = name
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._turn("assistant").setdefault("tool_calls", []).append(call)

    def has_call(self, call_id: str) -> bool:
        return call_id in self._name_by_call

    def add_result(self, call_id: str, texts: list[str], *, is_error: bool = False) -> None:
        name = self._name_by_call.get(call_id)
        self.messages.append(
            {
                "role": "tool",
                "content": [{"type": "text", "text": text} for text in texts],
                "tool_call_id": call_id,
                **({} if name is None else {"name": name}),
                **({"is_error": True} if is_error else {}),
            }
        )

    def _turn(self, role: str) -> dict[str, Any]:
        """Return the last message, or a new one if it is of another role."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": []})
        return self.messages[-1]


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
