"""Stop strings over a text that comes in pieces. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopRule:
    """Texts that end an answer."""

    strings: tuple[str, ...] = ()
    is_included: bool = False  # whether the text that ended it is part of the answer
    min_tokens: int = 0  # none of them counts before so many tokens


class StopWatcher:
    """Lets text through once it cannot be the beginning of a stop string any more."""

    def __init__(self, rule: StopRule) -> None:
        self._rule = rule
        self._held = ""
        self.found: str | None = None

    def push(self, text: str, num_tokens: int) -> str:
        """What may be told of the text so far; nothing more once a stop string was found."""
        if not self._rule.strings:
            return text
        self._held += text
        if num_tokens > self._rule.min_tokens:
            self._look()
        if self.found is not None:
            return self._take(len(self._held))
        return self._take(len(self._held) - self._num_to_hold())

    def flush(self) -> str:
        """The answer ended otherwise: what was held back belongs to it."""
        return self._take(len(self._held))

    def _look(self) -> None:
        """The stop string that ends first cuts the text; of two that end together, the longer."""
        ends = [
            (self._held.index(stop) + len(stop), -len(stop), stop)
            for stop in self._rule.strings
            if stop in self._held
        ]
        if ends:
            end, _, self.found = min(ends)
            self._held = self._held[: end if self._rule.is_included else end - len(self.found)]

    def _num_to_hold(self) -> int:
        """The longest end of the text that begins a stop string."""
        longest = max((len(stop) for stop in self._rule.strings), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._rule.strings):
                return length
        return 0

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken
