"""Latencies of bystanders of a hostile client, checked against their limits. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.chaos.faults import TIER_LOAD, FaultKind, InjectedFault
from benchmarks.chaos.hostile.bystander import ObservedWait, Wait
from benchmarks.chaos.hostile.requests import ACCEPTED

MAX_GAP_S = MAX_HEALTH_S = 1.0
BOUND_S = {Wait.GAP: MAX_GAP_S, Wait.HEALTH: MAX_HEALTH_S}
# Effects of a fault or attack may last a little longer than itself.
AFTERMATH_S = 3.0
BUGS = {"500", "INTERNAL", "UNKNOWN"}  # statuses of errors without a name
ATTACKS = TIER_LOAD | {FaultKind.HOSTILE}


@dataclass(frozen=True, slots=True)
class WorstWaits:
    """Longest waits during one attack or heavy use of tiers, without other faults."""

    attack: str
    gap_s: float
    first_token_s: float
    health_s: float
    outcomes: str


@dataclass(frozen=True, slots=True)
class BystanderLatencies:
    num_gaps: int
    num_health: int
    worst_gap_s: float  # outside of faults other than attacks
    worst_health_s: float
    worst_quiet_gap_s: float  # without fault and attack
    worst_quiet_health_s: float
    worst_lag_s: float
    by_attack: Sequence[WorstWaits]
    missed: Sequence[str]  # exceeded limits, and attacks that got no named error


def bystander_latencies(
    waits: Sequence[ObservedWait], counts: Mapping[str, int], injected: Sequence[InjectedFault]
) -> BystanderLatencies:
    attacks = [one for one in injected if one.fault.kind in ATTACKS]
    faults = [one for one in injected if one.fault.kind not in ATTACKS]
    counted = [one for one in waits if not any(_overlap(one, fault) for fault in faults)]
    quiet = [one for one in counted if not any(_overlap(one, attack) for attack in attacks)]
    return BystanderLatencies(
        num_gaps=counts.get(Wait.GAP.value, 0),
        num_health=counts.get(Wait.HEALTH.value, 0),
        worst_gap_s=_worst(counted, Wait.GAP),
        worst_health_s=_worst(counted, Wait.HEALTH),
        worst_quiet_gap_s=_worst(quiet, Wait.GAP),
        worst_quiet_health_s=_worst(quiet, Wait.HEALTH),
        worst_lag_s=_worst(waits, Wait.LAG),
        by_attack=list(_by_attack(counted, attacks)),
        missed=[*_missed(counted, attacks), *_unnamed(attacks)],
    )


def _by_attack(
    waits: Sequence[ObservedWait], attacks: Sequence[InjectedFault]
) -> Iterator[WorstWaits]:
    for name in sorted({one.attack for one in attacks}):
        matching = [one for one in attacks if one.attack == name]
        during = [wait for wait in waits if any(_overlap(wait, one) for one in matching)]
        outcomes: dict[str, int] = {}
        for one in matching:
            for outcome, count in (one.outcomes or {}).items():
                outcomes[outcome] = outcomes.get(outcome, 0) + count
        yield WorstWaits(
            name,
            gap_s=_worst(during, Wait.GAP),
            first_token_s=_worst(during, Wait.FIRST_TOKEN),
            health_s=_worst(during, Wait.HEALTH),
            outcomes=", ".join(f"{count} {what}" for what, count in sorted(outcomes.items())),
        )


def _missed(waits: Sequence[ObservedWait], attacks: Sequence[InjectedFault]) -> Iterator[str]:
    """Yield each wait above its limit, and failures by reason."""
    failures: Counter[str] = Counter()
    for wait in waits:
        kind, wait_s = Wait(wait.kind), wait.ended_s - wait.began_s
        bound_s = BOUND_S.get(kind)
        names = sorted({one.attack for one in attacks if _overlap(wait, one)})
        context = f"during: {', '.join(names) or 'nothing'}"
        if kind is Wait.FAILURE:
            failures[f"{wait.reason}; {context}"] += 1
        elif bound_s is not None and wait_s > bound_s:
            yield f"{kind.value} of {wait_s:.2f} s, {bound_s:g} s allowed; {context}"
    for failure, count in failures.items():
        yield f"failed {count} times: {failure}"


def _unnamed(attacks: Sequence[InjectedFault]) -> Iterator[str]:
    """Yield errors without a name, and bad orders that were accepted."""
    for one in attacks:
        for outcome, count in (one.outcomes or {}).items():
            if outcome.split(maxsplit=1)[0] in BUGS or outcome.startswith(ACCEPTED):
                yield f"{count} outcomes are {outcome!r}; during: {one.attack}"


def _overlap(wait: ObservedWait, injected: InjectedFault) -> bool:
    return wait.began_s <= injected.recovered_s + AFTERMATH_S and injected.at_s <= wait.ended_s


def _worst(waits: Sequence[ObservedWait], kind: Wait) -> float:
    return max((one.ended_s - one.began_s for one in waits if one.kind == kind.value), default=0.0)
