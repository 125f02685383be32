"""Report of a chaos run: outcomes of all requests, recovery times. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from baton.rpc.channel import MAX_RECONNECT_S
from baton.telemetry import names
from baton.telemetry.metrics import names as counted
from benchmarks.chaos.faults import SHARED_FAULTS, Fault, FaultKind, InjectedFault, TargetRole
from benchmarks.chaos.hostile.latencies import BystanderLatencies
from benchmarks.chaos.leaks import ProcessMemory, Scrape
from benchmarks.chaos.load import AnswerOutcome, RequestOutcome
from benchmarks.chaos.second_turns import MIN_TAKEN, LoadsRow

# Not a loss: a refusal by a full queue, or, with a short deadline, one as too late.
FAIR_REASONS, FAIR_TO_THE_HURRIED = ("QUEUE_FULL",), ("TOO_LATE",)
# Tolerance after a deadline, within which a busy client receives the error.
OVERDUE_S = 1.0
# Prefix of the evidence that is a maximum rather than a sum; and the bound of one of them.
WORST = "worst "
TIERS_CPU, MAX_TIERS_CPU = "worst use of a core by a node's tiers", 0.25


@dataclass(frozen=True, slots=True)
class Recovery:
    """Time from a kill to the next token of the affected streams."""

    of: str
    num: int
    median_s: float
    most_s: float


@dataclass(frozen=True, slots=True)
class Evidence:
    """Counts that prove that faults of a kind struck."""

    fault: str
    what: str
    count: float


@dataclass(slots=True)
class Attempts:
    """Attempts counted by routers, including killed ones."""

    by_kind_by_pid: dict[int, Counter[str]] = field(default_factory=dict)

    def note(self, pid: int, found: Scrape) -> None:
        kinds = (names.RETRY, names.MIGRATE)
        counts = {kind: round(found.total(counted.ATTEMPTS, kind)) for kind in kinds}
        self.by_kind_by_pid[pid] = Counter(counts)

    def total(self, kind: str) -> int:
        return sum(counts[kind] for counts in self.by_kind_by_pid.values())


@dataclass(frozen=True, slots=True)
class Report:
    elapsed_s: float
    num_faults: int
    counts: Mapping[str, int]
    recoveries: Sequence[Recovery]
    reasons: Mapping[str, int]
    num_by_fault: Mapping[str, int]
    num_by_kind: Mapping[str, int]  # right answers by kind of request
    wrong: Sequence[str]
    hung: Sequence[str]
    lost: Sequence[str]
    overdue: Sequence[str]
    leaks: Sequence[str]
    died: Sequence[str]
    memory: Sequence[ProcessMemory] = ()
    bystanders: BystanderLatencies | None = None  # None: no hostile client
    loads: Sequence[LoadsRow] = ()
    skipped: Sequence[str] = ()
    evidence: Sequence[Evidence] = ()

    @property
    def is_good(self) -> bool:
        unanswered = self.hung or self.lost or self.overdue
        return not (self.wrong or unanswered or self.leaks or self.died or self.missed)

    @property
    def missed(self) -> Sequence[str]:
        """Exceeded limits: of bystanders, of loads that were not taken, and of the tiers' CPU."""
        bystanders = () if self.bystanders is None else self.bystanders.missed
        return [*bystanders, *_missed_loads(self.loads), *_missed_cpu(self.evidence)]


def report(
    records: Sequence[AnswerOutcome],
    injected: Sequence[InjectedFault],
    attempts: Attempts,
    *,
    elapsed_s: float,
    leaks: Sequence[str],
    died: Sequence[str],
    memory: Sequence[ProcessMemory] = (),
    bystanders: BystanderLatencies | None = None,
    loads: Sequence[LoadsRow] = (),
    wrong_turns: Sequence[str] = (),
    skipped: Sequence[str] = (),
) -> Report:
    by_outcome = Counter(one.outcome for one in records)
    lost = [one for one in records if _is_lost(one, injected)]
    overdue = [one for one in records if _is_overdue(one)]
    failed = (
        one for one in records if one.outcome in (RequestOutcome.REFUSED, RequestOutcome.BROKEN)
    )
    evidence = list(_evidence(injected))
    missed_by_bystanders = () if bystanders is None else bystanders.missed
    num_missed = sum(
        map(len, (missed_by_bystanders, [*_missed_loads(loads)], [*_missed_cpu(evidence)]))
    )
    counts = {
        "requests": len(records),
        "hurried": sum(one.has_short_deadline for one in records),
        **{outcome.value: by_outcome[outcome] for outcome in RequestOutcome},
        "retried": attempts.total(names.RETRY),
        "migrated": attempts.total(names.MIGRATE),
        "local": sum(one.is_local for one in records),
        "drafted tokens": sum(one.num_drafted for one in records),
        "accepted tokens": sum(one.num_accepted for one in records),
        "lost": len(lost),
        "overdue": len(overdue),
        "leaked": len(leaks),
        "died": len(died),
    }
    counts["wrong"] += len(wrong_turns)
    counts["memory over"] = sum(not one.is_within for one in memory)
    counts["missed bounds"] = num_missed
    return Report(
        elapsed_s=elapsed_s,
        num_faults=len(injected),
        counts=counts,
        recoveries=list(_recoveries(records, injected)),
        reasons=dict(Counter(f"{one.outcome.value}: {one.reason}" for one in failed)),
        num_by_fault=dict(Counter(_kind(one.fault) for one in injected)),
        num_by_kind=dict(
            Counter(one.kind for one in records if one.outcome is RequestOutcome.RIGHT)
        ),
        wrong=[
            *(_line(one, injected) for one in records if one.outcome is RequestOutcome.WRONG),
            *wrong_turns,
        ],
        hung=[_line(one, injected) for one in records if one.outcome is RequestOutcome.HUNG],
        lost=[_line(one, injected) for one in lost],
        overdue=[_line(one, injected) for one in overdue],
        leaks=leaks,
        died=died,
        memory=memory,
        bystanders=bystanders,
        loads=loads,
        skipped=skipped,
        evidence=evidence,
    )


def _missed_loads(loads: Sequence[LoadsRow]) -> Iterator[str]:
    for one in loads:
        if not one.turns:
            yield f"no second turn was measured; during: {one.kind}"
        elif not one.is_within:
            yield (
                f"{one.taken:.0%} of {one.profitable} profitable loads were taken, {MIN_TAKEN:.0%} "
                f"wanted; during: {one.kind}"
            )


def _missed_cpu(evidence: Sequence[Evidence]) -> Iterator[str]:
    for one in evidence:
        if one.what == TIERS_CPU and one.count > MAX_TIERS_CPU:
            yield (
                f"a node's tiers used {one.count:.2f} of a core, {MAX_TIERS_CPU:g} allowed; "
                f"during: {one.fault}"
            )


def _evidence(injected: Sequence[InjectedFault]) -> Iterator[Evidence]:
    """Yield the sums, or maxima, over the faults of each kind."""
    totals: dict[tuple[str, str], float] = {}
    for one in injected:
        for what, count in one.evidence.items():
            key = one.fault.kind.value, what
            so_far = totals.get(key, 0.0)
            totals[key] = max(so_far, count) if what.startswith(WORST) else so_far + count
    for (kind, what), count in sorted(totals.items()):
        yield Evidence(kind, what, round(count, 3))


def _is_lost(record: AnswerOutcome, injected: Sequence[InjectedFault]) -> bool:
    """Return whether a request failed without a killed router or a fair refusal."""
    fair = FAIR_REASONS + (FAIR_TO_THE_HURRIED if record.has_short_deadline else ())
    if (
        record.outcome not in (RequestOutcome.REFUSED, RequestOutcome.BROKEN)
        or record.reason in fair
    ):
        return False
    return not any(
        record.began_s <= one.recovered_s + MAX_RECONNECT_S and one.at_s <= record.ended_s
        for one in injected
        if _is_router_gone(one)
    )


def _is_overdue(record: AnswerOutcome) -> bool:
    return record.ended_s - record.began_s > record.patience_s + OVERDUE_S


def _is_router_gone(injected: InjectedFault) -> bool:
    return injected.fault.kind is FaultKind.KILL and injected.fault.role is TargetRole.ROUTER


def _overlap(record: AnswerOutcome, injected: InjectedFault) -> bool:
    return record.began_s <= injected.recovered_s and injected.at_s <= record.ended_s


def _kind(fault: Fault) -> str:
    is_shared = fault.kind in SHARED_FAULTS
    return fault.kind.value if is_shared else f"{fault.kind.value} {fault.role.value}"


def _line(record: AnswerOutcome, injected: Sequence[InjectedFault]) -> str:
    faults = ", ".join(
        f"{one.fault.kind.value} {one.victim} from {one.at_s - record.began_s:.1f} "
        f"to {one.recovered_s - record.began_s:.1f} s"
        for one in injected
        if _overlap(record, one)
    )
    lasted_s = record.ended_s - record.began_s
    what = (
        f"request {record.tag} ({record.kind}), {len(record.arrivals_s)} chunks in {lasted_s:.1f} s"
    )
    return f"{what}: {record.reason}; faults: {faults or 'none'}"


def _recoveries(
    records: Sequence[AnswerOutcome], injected: Sequence[InjectedFault]
) -> Iterator[Recovery]:
    for role in (TargetRole.PREFILL, TargetRole.DECODE):
        waits_s = [
            next_s - one.at_s
            for one in injected
            if one.fault.kind is FaultKind.KILL and one.fault.role is role
            for next_s in _next_tokens(records, one)
        ]
        if waits_s:
            yield _recovery(f"{role.value} death to next token", waits_s)
    lives = [one for one in injected if _is_router_gone(one)]
    ends_s = [*(one.at_s for one in lives[1:]), math.inf]
    waits_s = [
        wait_s
        for one, end_s in zip(lives, ends_s, strict=False)
        for wait_s in _first_tokens(records, one, end_s)
    ]
    if waits_s:
        yield _recovery("router restart to first token", waits_s)


def _next_tokens(records: Sequence[AnswerOutcome], injected: InjectedFault) -> Iterator[float]:
    """Yield the waits of running streams that were retried or computed locally."""
    for one in records:
        is_touched = one.attempts > 1 or one.is_local
        if is_touched and one.began_s < injected.at_s < one.ended_s:
            later = [arrival_s for arrival_s in one.arrivals_s if arrival_s > injected.at_s]
            yield from later[:1]


def _first_tokens(
    records: Sequence[AnswerOutcome], injected: InjectedFault, end_s: float
) -> Iterator[float]:
    """Yield the wait for the first token after a router restart, if there was one."""
    arrivals_s = (
        one.arrivals_s[0] for one in records if one.arrivals_s and one.arrivals_s[0] < end_s
    )
    later = [arrival_s - injected.listening_s for arrival_s in arrivals_s]
    yield from sorted(wait_s for wait_s in later if wait_s > 0)[:1]


def _recovery(of: str, waits_s: Sequence[float]) -> Recovery:
    return Recovery(of, len(waits_s), statistics.median(waits_s), max(waits_s))


def report_values(found: Report) -> dict[str, object]:
    return asdict(found) | {"is_good": found.is_good}
