"""Share of drafted tokens that are accepted, by their position in the draft. Pure."""

from __future__ import annotations

from collections.abc import Sequence

# Of a rate, expected at the next position: few drafts reach the last ones.
CARRIED = 0.95
MAX_WEIGHT = 1e100


class AcceptanceRates:
    """Rates at which a token is accepted if all before it were. Old drafts count ever less."""

    def __init__(
        self,
        num_positions: int,
        kept_per_step: float,
        prior: float = 1.0,
        carried: float = CARRIED,
    ) -> None:
        """`prior` is the number of drafts that the expected rates count as."""
        self._kept = kept_per_step
        self._prior, self._carried = prior, carried
        self._weight = 1.0  # of a draft now: it grows, instead of the sums being reduced
        self._tested = [0.0] * num_positions
        self._accepted = [0.0] * num_positions

    def note_draft(self, num_proposed: int, num_accepted: int) -> None:
        for position in range(min(num_accepted + 1, num_proposed)):
            self._tested[position] += self._weight
            if position < num_accepted:
                self._accepted[position] += self._weight

    def end_step(self) -> None:
        self._weight /= self._kept
        if self._weight > MAX_WEIGHT:
            self._tested = [each / self._weight for each in self._tested]
            self._accepted = [each / self._weight for each in self._accepted]
            self._weight = 1.0

    def rates(self, expected: Sequence[float]) -> list[float]:
        """Return the rates of the first positions.

        The expected ones are mixed in, or those of the position before if they are higher.
        """
        weight, rate = self._weight * self._prior, 0.0
        rates: list[float] = []
        for accepted, tested, each in zip(self._accepted, self._tested, expected, strict=False):
            rate = (accepted + weight * max(each, self._carried * rate)) / (tested + weight)
            rates.append(rate)
        return rates
