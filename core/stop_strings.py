"""Stop strings in streamed text. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopRule:
    """Stop strings of a request."""

    strings: tuple[str, ...] = ()
    is_included: bool = False  # the answer includes the stop string
    min_tokens: int = 0  # stop strings are ignored up to this number of tokens


class StopWatcher:
    """Stop string filter: holds text back while it may be the beginning of a stop string."""

    def __init__(self, rule: StopRule) -> None:
        self._rule = rule
        self._held = ""
        self.found: str | None = None

    def push(self, text: str, num_tokens: int) -> str:
        """Add text and return what can be emitted; nothing more after a stop string was found."""
        if not self._rule.strings:
            return text
        self._held += text
        if num_tokens > self._rule.min_tokens:
            self._find_stop()
        if self.found is not None:
            return self._release(len(self._held))
        return self._release(len(self._held) - self._num_held_back())

    def flush(self) -> str:
        """Return the text held back, at the end of an answer without a stop string."""
        return self._release(len(self._held))

    def _find_stop(self) -> None:
        """Cut the text at the stop string that ends first; of two with the same end, the longer."""
        ends = [
            (self._held.index(stop) + len(stop), -len(stop), stop)
            for stop in self._rule.strings
            if stop in self._held
        ]
        if ends:
            end, _, self.found = min(ends)
            self._held = self._held[: end if self._rule.is_included else end - len(self.found)]

    def _num_held_back(self) -> int:
        """Return the length of the longest suffix of the text that is a prefix of a stop string."""
        longest = max((len(stop) for stop in self._rule.strings), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._rule.strings):
                return length
        return 0

    def _release(self, length: int) -> str:
        released, self._held = self._held[:length], self._held[length:]
        return released
