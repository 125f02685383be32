"""A chat as it grows: what was said, and what the next answer is asked with. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Message = Mapping[str, str]  # role and content

NAMES = {"user": "User", "assistant": "Assistant"}
# Where a model without a chat template begins to speak for the user.
PLAIN_STOP = "\nUser:"


@dataclass(slots=True)
class Conversation:
    system: str = ""
    turns: list[Message] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.turns]

    @property
    def plain_text(self) -> str:
        """For models without a chat template: a dialogue for the model to go on with."""
        lines = [f"{NAMES[turn['role']]}: {turn['content'].strip()}" for turn in self.turns]
        return "\n".join(([self.system, ""] if self.system else []) + lines) + "\nAssistant:"

    def ask(self, content: str) -> None:
        self.turns.append({"role": "user", "content": content})

    def answer(self, content: str) -> None:
        """What the model said, or as much of it as was waited for."""
        self.turns.append({"role": "assistant", "content": content})

    def take_back(self) -> None:
        """The question that got no answer: templates want the roles in turn."""
        self.turns.pop()

    def reset(self) -> None:
        self.turns.clear()
