"""Pure parts of a chaos run: fault script, check of answers and report."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import subprocess
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.client import Answer, Finish, Generation, Served
from baton.core.errors import InvalidConfig
from baton.core.output import FinishReason, TokenLogprobs
from baton.router.http.bodies import MAX_BODY_BYTES
from benchmarks.chaos.faults import (
    ROLES_BY_FAULT_KIND,
    Fault,
    FaultKind,
    InjectedFault,
    Phase,
    Script,
    TargetRole,
    faults,
)
from benchmarks.chaos.generated_text import GeneratedText
from benchmarks.chaos.hostile.bystander import ObservedWait, Wait
from benchmarks.chaos.hostile.latencies import bystander_latencies
from benchmarks.chaos.hostile.requests import Attack, attacks, posts
from benchmarks.chaos.leaks import (
    DESCRIPTORS_PER_LINK,
    SPARE_DESCRIPTORS,
    SPARE_THREADS,
    Footprint,
    footprint,
    grown,
    held,
    may_have_grown,
    memory_growth,
    named_memory,
    num_adapters,
    parse,
    resident_bytes,
)
from benchmarks.chaos.load import AnswerOutcome, RequestOutcome
from benchmarks.chaos.pictures import PICTURE_KINDS
from benchmarks.chaos.pooled_text import Embeddings, Ranking
from benchmarks.chaos.report import Attempts, Report, report
from benchmarks.chaos.sending import ChaosRequest, Router
from benchmarks.chaos.workload import KINDS, Drawing, draw_requests
from benchmarks.cli.chaos import parse_num_ranks

NUM_BY_ROLE = {TargetRole.ROUTER: 1, TargetRole.PREFILL: 2, TargetRole.DECODE: 2}
SERVED = Served("p", "d", True, "", 1, 1, "nixl", 0, 0, 1)
FINISH = Finish(FinishReason.LENGTH, 3, 2, 0.0, 0.0, 0.0, 0.0, SERVED)


def test_the_fault_plan_depends_on_the_seed_alone() -> None:
    first, again, other = (
        faults(Script(seed=seed, duration_s=300), NUM_BY_ROLE) for seed in (1, 1, 2)
    )

    assert first == again
    assert first != other


def test_each_fault_kind_hits_its_possible_roles_equally_often() -> None:
    drawn = faults(Script(duration_s=2000, every_s=1), NUM_BY_ROLE)

    times = Counter((fault.kind, fault.role) for fault in drawn)
    assert set(times) == {
        (kind, role) for kind, roles in ROLES_BY_FAULT_KIND.items() for role in roles
    }
    assert max(times.values()) - min(times.values()) <= 1
    assert {fault.place for fault in drawn if fault.role is TargetRole.DECODE} == {0, 1}
    assert {fault.phase for fault in drawn} == set(Phase)


def test_the_numbers_of_processes_of_nodes_are_one_or_two() -> None:
    assert parse_num_ranks("2") == (2, 2)
    assert parse_num_ranks("1,2") == (1, 2)
    for wrong in ("", "1,2,3", "two", "0", "1,0"):
        with pytest.raises(InvalidConfig, match="--ranks"):
            parse_num_ranks(wrong)


def test_faults_without_a_possible_target_are_refused() -> None:
    with pytest.raises(InvalidConfig):
        Script(kinds=(FaultKind.CUT,), roles=(TargetRole.DECODE,))


def an_answer(token_ids: tuple[int, ...] = (4, 5), text: str = "ab", logprob: float = -1) -> Answer:
    logprobs = [TokenLogprobs(token_id, logprob, 1, ()) for token_id in token_ids]
    return Answer("r", list(token_ids), text, logprobs, finish=FINISH)


TEXT = GeneratedText(0, "greedy", (1, 2, 3), Generation())


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (an_answer((4, 6)), "index 1"),
        (an_answer((4,)), "index the end"),
        (an_answer((4, 5, 5)), "index the end"),
        (an_answer(text="aB"), "text"),
        (an_answer(logprob=-1.1), "logprobs"),
        (replace(an_answer(), finish=replace(FINISH, reason=FinishReason.STOP)), "reason"),
        (replace(an_answer(), logprobs=[]), "logprobs"),
        (replace(an_answer(), finish=None), "no finish reason"),
    ],
)
def test_any_difference_from_the_expected_answer_is_detected(answer: Answer, word: str) -> None:
    difference = TEXT.difference(answer, an_answer())

    assert difference is not None
    assert word in difference


def test_an_answer_with_another_route_is_correct() -> None:
    elsewhere = replace(FINISH, served=replace(SERVED, attempts=3, decode_node="e"))

    answer = replace(an_answer(logprob=-1.001), finish=elsewhere)

    assert TEXT.difference(answer, an_answer()) is None


def test_any_difference_between_vectors_and_scores_is_detected() -> None:
    vectors = Embeddings(0, "encode", ("a", "b"))
    ranking = Ranking(0, "rerank", "a", ("b", "c"))
    one, two = np.array([0.6, 0.8], np.float32), np.array([1.0, 0.0], np.float32)

    assert vectors.difference([one, two + 1e-4], [one, two]) is None
    for wrong, word in (
        ([two, one], "vector 0 differs by 0.8"),
        ([one], "1 vectors"),
        ([one, two[:1]], "1 numbers"),
        ([one, two * np.nan], "vector 1 differs by nan"),
    ):
        assert word in (vectors.difference(wrong, [one, two]) or "")
    assert ranking.difference({0: 0.5, 1: 0.25}, {0: 0.5, 1: 0.2501}) is None
    assert "document 1" in (ranking.difference({0: 0.5, 1: 0.3}, {0: 0.5, 1: 0.2}) or "")
    assert "documents [0]" in (ranking.difference({0: 0.5}, {0: 0.5, 1: 0.2}) or "")


ALL_KINDS = {**KINDS, **PICTURE_KINDS}


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_requests_of_each_kind_follow_from_the_seed_and_differ_between_tags(kind: str) -> None:
    def drawn(tag: int, seed: int) -> ChaosRequest:
        return ALL_KINDS[kind](Drawing(tag, kind, random.Random(seed), range(4, 300)))

    assert drawn(1, 3) == drawn(1, 3)
    assert drawn(1, 3) != drawn(1, 4)
    assert drawn(1, 3) != drawn(2, 3)
    assert (drawn(1, 3).tag, drawn(1, 3).kind) == (1, kind)


@pytest.mark.parametrize(
    ("kind", "stop", "prediction"),
    [("stop", ("fghi",), ""), ("predicted", (), "abcdej"), ("greedy", (), "")],
)
def test_what_a_request_needs_of_its_answer_is_cut_from_the_middle(
    kind: str, stop: tuple[str, ...], prediction: str
) -> None:
    drawn: Any = KINDS[kind](Drawing(1, kind, random.Random(0), range(4, 300)))

    generation = drawn.refined(Answer(text="abcdefghij")).generation

    assert (generation.stop, generation.prediction) == (stop, prediction)


def test_a_share_of_the_requests_is_about_pictures() -> None:
    class Model:
        vocab_size = 300

    class OneModel:
        async def model(self, _name: str) -> Model:
            return Model()

    client: Any = OneModel()
    drawing = draw_requests(Router(client, ""), 1, 40, PICTURE_KINDS, further_share=0.25)
    kinds = Counter(request.kind for request in asyncio.run(drawing))

    assert {kind: kinds[kind] for kind in PICTURE_KINDS} == dict(
        zip(PICTURE_KINDS, (4, 3, 3), strict=True)
    )
    assert kinds.total() - 10 == sum(kinds[kind] for kind in KINDS)


METRICS = """
# HELP baton_kv_blocks KV blocks
baton_kv_blocks{state="free"} 90.0
baton_kv_blocks{state="cached"} 6.0
baton_kv_blocks{state="granted"} 0.0
baton_kv_blocks{state="fenced"} 2.0
baton_handoffs_open{direction="received"} 0.0
baton_handoffs_open{direction="sent"} 1.0
baton_requests_waiting{status="ready"} 0.0
baton_encoder_rows 16.0
baton_adapters{state="named"} 3.0
baton_adapters{state="in_use"} 1.0
baton_attempts_total{kind="migrate"} 4.0
baton_attempts_created{kind="migrate"} 1.7e9
"""


def test_leaked_resources_are_named() -> None:
    assert list(held(parse(METRICS))) == [
        "1 open hand-offs",
        "2 fenced blocks",
        "16 rows of encodings",
        "1 adapters in use",
    ]
    assert num_adapters(parse(METRICS)) == 3


def descriptors(num_sockets: int, **more: int) -> Counter[str]:
    return Counter({"socket:[N]": num_sockets, **more})


def test_leaked_descriptors_and_threads_beyond_a_tolerance_are_named() -> None:
    before = Footprint(descriptors(20), 10, 0)
    spare = Footprint(descriptors(20 + SPARE_DESCRIPTORS), 10 + SPARE_THREADS, 10**9)

    assert list(grown(before, spare)) == []
    assert list(grown(before, Footprint(descriptors(20), 11 + SPARE_THREADS, 0))) == [
        f"{SPARE_THREADS + 1} more threads than the 10 at the start"
    ]


def test_a_process_may_have_grown_if_it_has_more_descriptors_or_threads_than_the_tolerance() -> (
    None
):
    now = footprint(os.getpid())
    fewer_threads = replace(now, num_threads=now.num_threads - SPARE_THREADS - 1)
    num_fewer = SPARE_DESCRIPTORS + 2 * DESCRIPTORS_PER_LINK + 2
    fewer_descriptors = replace(now, descriptors=descriptors(now.num_descriptors - num_fewer))

    assert not may_have_grown(now, os.getpid())
    assert may_have_grown(fewer_threads, os.getpid())
    assert may_have_grown(fewer_descriptors, os.getpid(), num_new_links=2)
    assert not may_have_grown(fewer_descriptors, os.getpid(), num_new_links=3)


def test_links_of_pulls_are_not_a_leak_and_further_descriptors_are() -> None:
    before = Footprint(descriptors(20), 10, 0)
    spare = SPARE_DESCRIPTORS + 2 * DESCRIPTORS_PER_LINK

    assert list(grown(before, Footprint(descriptors(20 + spare), 10, 0), num_new_links=2)) == []
    after = Footprint(descriptors(20 + spare, file=1), 10, 0)
    assert list(grown(before, after, num_new_links=2)) == [
        f"{spare + 1} more descriptors than the 20 at the start: {spare} socket:[N], 1 file"
    ]


def test_shared_memory_that_has_had_a_name_for_a_while_is_named(tmp_path: Path) -> None:
    for name in ("left", "of a link that opens"):
        (tmp_path / name).touch()
    os.utime(tmp_path / "left", (0, 0))

    assert named_memory(tmp_path) == {"left"}
    assert named_memory(tmp_path / "of another system") == set()


def test_pooled_connections_are_left_out_of_a_footprint() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()),
    ):
        port = server.getsockname()[1]
        whole, rest = footprint(os.getpid()), footprint(os.getpid(), (port,))

    assert whole.descriptors - rest.descriptors == Counter({"TCP connection": 1})
    assert rest.descriptors["TCP listener"] > 0


def test_attempts_of_killed_routers_are_counted() -> None:
    attempts = Attempts()

    attempts.note(1, parse(METRICS))
    attempts.note(1, parse(METRICS))
    attempts.note(2, parse(METRICS))

    assert (attempts.total("migrate"), attempts.total("retry")) == (8, 0)


def injected(kind: FaultKind, role: TargetRole, at_s: float, recovered_s: float) -> InjectedFault:
    fault = Fault(0, at_s, kind, role, 0, Phase.SENT, 1.0)
    return InjectedFault(
        fault, role.value, at_s, listening_s=recovered_s - 1, recovered_s=recovered_s
    )


def an_outcome(
    outcome: RequestOutcome = RequestOutcome.RIGHT, reason: str = "", **given: object
) -> AnswerOutcome:
    one = AnswerOutcome(7, "greedy", began_s=10.0, ended_s=20.0, outcome=outcome, reason=reason)
    for name, value in given.items():
        setattr(one, name, value)
    return one


def reported(
    *tolds: AnswerOutcome, faults: tuple[InjectedFault, ...] = (), leaks: tuple[str, ...] = ()
) -> Report:
    return report(tolds, faults, Attempts(), elapsed_s=60, leaks=leaks, died=())


def test_a_run_without_errors_passes() -> None:
    assert reported(an_outcome(), an_outcome(RequestOutcome.CANCELLED)).is_good


def test_short_deadlines_may_fail_if_the_error_arrives_in_time() -> None:
    late = an_outcome(RequestOutcome.LATE, patience_s=9.5)
    refused = an_outcome(RequestOutcome.REFUSED, "TOO_LATE", patience_s=9.5)

    found = reported(late, refused)

    assert found.is_good
    assert (found.counts["late"], found.counts["hurried"]) == (1, 2)


@pytest.mark.parametrize(
    ("one", "name"),
    [
        (an_outcome(RequestOutcome.WRONG, "tokens differ"), "wrong"),
        (an_outcome(RequestOutcome.HUNG, "no end"), "hung"),
        (an_outcome(RequestOutcome.REFUSED, "NO_NODES"), "lost"),
        (an_outcome(RequestOutcome.BROKEN, "NODE_FAILED"), "lost"),
        (an_outcome(RequestOutcome.REFUSED, "TOO_LATE"), "lost"),
        (an_outcome(RequestOutcome.LATE, patience_s=2.0), "overdue"),
        (an_outcome(RequestOutcome.REFUSED, "TOO_LATE", patience_s=8.5), "overdue"),
    ],
)
def test_a_failure_is_reported_with_the_faults_at_that_time(one: AnswerOutcome, name: str) -> None:
    found = reported(
        an_outcome(), one, faults=(injected(FaultKind.KILL, TargetRole.DECODE, 12.0, 15.0),)
    )

    [line] = getattr(found, name)
    assert one.reason in line
    assert "kill decode from 2.0 to 5.0 s" in line
    assert found.counts[name] == 1
    assert not found.is_good


def test_failures_at_a_killed_or_full_router_are_not_lost_requests() -> None:
    without_router = an_outcome(RequestOutcome.BROKEN, "UNREACHABLE")
    refused = an_outcome(RequestOutcome.REFUSED, "QUEUE_FULL", began_s=100.0, ended_s=100.1)

    found = reported(
        without_router, refused, faults=(injected(FaultKind.KILL, TargetRole.ROUTER, 12.0, 15.0),)
    )

    assert found.is_good
    assert (found.counts["broken"], found.counts["refused"]) == (1, 1)


def test_a_leak_fails_the_run() -> None:
    assert not reported(an_outcome(), leaks=("decode: 2 fenced blocks",)).is_good


def test_recovery_time_is_from_the_kill_to_the_next_token_of_affected_streams() -> None:
    touched = an_outcome(attempts=2, arrivals_s=[11.0, 12.5, 13.0])
    untouched = an_outcome(arrivals_s=[11.0, 12.1])
    death = injected(FaultKind.KILL, TargetRole.DECODE, 12.0, 15.0)

    [recovery] = reported(touched, untouched, faults=(death,)).recoveries

    assert (recovery.num, recovery.median_s, recovery.most_s) == (1, 0.5, 0.5)


def test_a_router_killed_again_before_it_served_has_not_recovered() -> None:
    first = injected(FaultKind.KILL, TargetRole.ROUTER, 12.0, 14.0)  # listens from 13.0 on
    second = injected(FaultKind.KILL, TargetRole.ROUTER, 15.0, 17.0)

    [recovery] = reported(an_outcome(arrivals_s=[16.5, 18.0]), faults=(first, second)).recoveries

    assert (recovery.num, recovery.most_s) == (1, 0.5)


def test_no_fault_is_drawn_for_a_role_without_processes() -> None:
    script = Script(kinds=(FaultKind.STOP, FaultKind.FREEZE), duration_s=600.0)
    counts = {TargetRole.DECODE: 2, TargetRole.PREFILL: 0, TargetRole.VLLM: 0}

    drawn = faults(script, counts)

    assert {fault.role for fault in drawn} == {*TargetRole} - {TargetRole.PREFILL, TargetRole.VLLM}
    with pytest.raises(InvalidConfig, match="no process"):
        faults(Script(roles=(TargetRole.VLLM,)), counts)


def test_attack_kinds_alternate_and_follow_from_the_seed() -> None:
    first, again, other = (list(islice(attacks(seed), 3 * len(Attack))) for seed in (1, 1, 2))

    assert first == again != other
    assert set(Counter(first).values()) == {3}


@pytest.mark.parametrize("attack", Attack)
def test_attack_bodies_are_within_the_size_limit_and_follow_from_the_seed(
    attack: Attack,
) -> None:
    first, again = (posts(attack, "demo", random.Random(3)) for _ in range(2))

    assert first == again
    assert all(len(post.body) <= MAX_BODY_BYTES for post in first)


def test_mutations_differ_between_seeds() -> None:
    one, other = (posts(Attack.MUTATIONS, "demo", random.Random(seed)) for seed in (3, 4))

    assert one != other


def waited(kind: Wait, began_s: float, ended_s: float, reason: str = "") -> ObservedWait:
    return ObservedWait(kind.value, began_s, ended_s, reason)


def attacked(attack: Attack, at_s: float, recovered_s: float) -> InjectedFault:
    one = injected(FaultKind.HOSTILE, TargetRole.ROUTER, at_s, recovered_s)
    one.attack = attack.value
    one.outcomes = {"400": 2}
    return one


def test_a_missed_latency_bound_is_reported_with_the_attack_and_fails_the_run() -> None:
    waits = [waited(Wait.GAP, 11.0, 12.5), waited(Wait.HEALTH, 12.0, 12.9)]
    attack = attacked(Attack.LONG_IDS, 10.0, 12.0)

    found = bystander_latencies(waits, {"gap": 100, "health": 9}, [attack])
    whole = replace(reported(an_outcome()), bystanders=found)

    assert (found.num_gaps, found.worst_gap_s, found.worst_quiet_gap_s) == (100, 1.5, 0.0)
    assert found.worst_health_s == pytest.approx(0.9)
    assert [(one.attack, one.gap_s) for one in found.by_attack] == [("long-ids", 1.5)]
    [missed] = found.missed
    assert "gap of 1.50 s" in missed
    assert "long-ids" in missed
    assert not whole.is_good


def test_waits_during_other_faults_do_not_count_against_the_limit() -> None:
    waits = [waited(Wait.GAP, 11.0, 15.0), waited(Wait.FAILURE, 11.0, 11.1, "UNREACHABLE")]

    found = bystander_latencies(
        waits, {}, [injected(FaultKind.KILL, TargetRole.ROUTER, 10.0, 12.0)]
    )

    assert found.missed == []


def test_a_failed_bystander_misses_the_latency_bound() -> None:
    found = bystander_latencies([waited(Wait.FAILURE, 11.0, 11.1, "/live: 503")], {}, [])

    [missed] = found.missed
    assert "/live: 503" in missed
    assert "nothing" in missed


def test_an_attack_without_named_errors_is_reported() -> None:
    attack = attacked(Attack.ADAPTERS, 10.0, 12.0)
    attack.outcomes = {"500": 1, "UNKNOWN": 2, "404 UNKNOWN_MODEL": 3, "wrongly accepted": 4}

    found = bystander_latencies([], {}, [attack])

    assert [one.split()[0] for one in found.missed] == ["1", "2", "4"]


def test_a_process_that_has_ended_has_no_memory() -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()

    assert resident_bytes(ended.pid) == 0
    assert resident_bytes(os.getpid()) > 0


def test_memory_growth_is_measured_for_processes_alive_in_the_whole_second_half() -> None:
    start = {"router": (1, 100 << 20), "decode-0": (2, 100 << 20)}
    middle = {"router": (1, 110 << 20), "decode-0": (3, 100 << 20)}
    end = {"router": (1, 121 << 20), "decode-0": (3, 130 << 20), "decode-1": (9, 1)}

    router, decode = memory_growth(start, middle, end)

    assert (router.start_mib, router.is_within) == (100, True)
    assert (decode.start_mib, decode.is_within) == (None, False)
