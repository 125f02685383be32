"""Second turns of a chaos run: how many of their prefixes were loaded from tiers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.chaos.faults import PROBES, FaultKind, InjectedFault
from benchmarks.chaos.hostile.latencies import AFTERMATH_S

MIN_TAKEN = 0.95  # of the loads without other faults
TAKEN_SHARE = 0.9  # of the missing tokens of a prefix
SLOW_AFTERMATH_S = 6.0  # until host memory has room again, and stores do not wait any more
LOAD_BYTES_PER_S = 1e9  # of a load that is profitable if computing takes longer


@dataclass(frozen=True, slots=True)
class ProbedTurn:
    """A second turn, and the same prompt computed right after it."""

    kind: FaultKind
    began_s: float
    ended_s: float
    prompt_tokens: int
    prefix_tokens: int  # whole blocks of the first prompt
    found_tokens: int  # in the KV cache
    loaded_tokens: int
    computed_s: float  # to the first token, of the computed one
    ttft_s: float
    is_right: bool
    can_load: bool = True  # the node that computed the rest has tiers
    node: str = ""  # that computed the rest

    def __str__(self) -> str:
        return (
            f"{self.kind.value}: {self.loaded_tokens} of {self.missing_tokens} tokens loaded by "
            f"{self.node}; the whole prompt was computed in {self.computed_s:.3f} s"
        )

    @property
    def missing_tokens(self) -> int:
        return max(0, self.prefix_tokens - self.found_tokens)

    @property
    def is_taken(self) -> bool:
        return self.loaded_tokens >= TAKEN_SHARE * self.missing_tokens

    def is_profitable(self, token_bytes: float) -> bool:
        """Return whether reading the missing KV takes less time than computing it."""
        compute_s = self.computed_s * self.missing_tokens / self.prompt_tokens
        return 0 < self.missing_tokens * token_bytes < compute_s * LOAD_BYTES_PER_S


@dataclass(frozen=True, slots=True)
class LoadsRow:
    """Loads of the second turns of one kind. Those next to other faults do not count."""

    kind: str
    turns: int
    next_to_faults: int
    without_tiers: int  # routed to a node that has none
    profitable: int
    taken: float  # share of these
    computed_s: float  # medians of these
    ttft_s: float

    @property
    def is_within(self) -> bool:
        return self.turns > 0 and self.taken >= MIN_TAKEN


def loads_rows(
    turns: Sequence[ProbedTurn], injected: Sequence[InjectedFault], token_bytes: float
) -> Iterator[LoadsRow]:
    kinds = {one.fault.kind for one in injected} & PROBES | {one.kind for one in turns}
    for kind in sorted(kinds, key=lambda kind: kind.value):
        all_turns = [one for one in turns if one.kind is kind]
        quiet = _quiet(all_turns, injected)
        loads = _profitable(quiet, token_bytes)
        yield LoadsRow(
            kind.value,
            turns=len(all_turns),
            next_to_faults=len(all_turns) - len(quiet),
            without_tiers=sum(not one.can_load for one in quiet),
            profitable=len(loads),
            taken=sum(one.is_taken for one in loads) / len(loads) if loads else 1.0,
            computed_s=median(one.computed_s for one in loads) if loads else 0.0,
            ttft_s=median(one.ttft_s for one in loads) if loads else 0.0,
        )


def skipped_loads(
    turns: Sequence[ProbedTurn], injected: Sequence[InjectedFault], token_bytes: float
) -> list[ProbedTurn]:
    """Return the turns that count, whose loads were profitable and not taken."""
    loads = _profitable(_quiet(turns, injected), token_bytes)
    return [one for one in loads if not one.is_taken]


def _quiet(turns: Sequence[ProbedTurn], injected: Sequence[InjectedFault]) -> list[ProbedTurn]:
    disturbing = [one for one in injected if one.fault.kind not in PROBES]
    return [one for one in turns if not any(_overlap(one, each) for each in disturbing)]


def _profitable(turns: Sequence[ProbedTurn], token_bytes: float) -> list[ProbedTurn]:
    return [one for one in turns if one.can_load and one.is_profitable(token_bytes)]


def _overlap(turn: ProbedTurn, injected: InjectedFault) -> bool:
    is_slow = injected.fault.kind is FaultKind.SLOW_DISK
    after_s = SLOW_AFTERMATH_S if is_slow else AFTERMATH_S
    return turn.began_s <= injected.recovered_s + after_s and injected.at_s <= turn.ended_s
