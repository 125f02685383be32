"""Chat history and the prompt for the next answer. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Message = Mapping[str, str]  # role and content

NAMES = {"user": "User", "assistant": "Assistant"}
# Stop string for models without a chat template, which would go on with the user's turn.
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
        """The chat as a plain text dialogue, for models without a chat template."""
        lines = [f"{NAMES[turn['role']]}: {turn['content'].strip()}" for turn in self.turns]
        return "\n".join(([self.system, ""] if self.system else []) + lines) + "\nAssistant:"

    def ask(self, content: str) -> None:
        self.turns.append({"role": "user", "content": content})

    def answer(self, content: str) -> None:
        """Append the answer of the model, which may be incomplete."""
        self.turns.append({"role": "assistant", "content": content})

    def remove_question(self) -> None:
        """Remove a question without an answer: templates require alternating roles."""
        self.turns.pop()

    def reset(self) -> None:
        self.turns.clear()
