"""Processes of ranks: their start, faults, logs and end, by ranks that compute nothing."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue

import pytest

from baton.core.errors import InvalidConfig, ModelError
from baton.engine.errors import ProcessLost, RunnerLost
from baton.engine.runner.ranks import processes as processes_module
from baton.engine.runner.ranks.processes import RankProcesses, RankWatch
from benchmarks.chaos.ranks import is_running, ranks_of
from tests.support.child_programs import running_program
from tests.support.open_files import open_files
from tests.support.rank_processes import PROGRAM, start_ranks
from tests.support.waits import await_value

Start = Callable[..., RankProcesses]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start ranks, which end with the test. Nothing of them may be left then."""
    before = open_files()
    started = []

    def make(*arguments: object, **named: object) -> RankProcesses:
        started.append(start_ranks(*arguments, **named))  # type: ignore[arg-type]
        return started[-1]

    yield make
    for processes in started:
        processes.close()
    assert own_ranks() == []
    await_value(open_files, lambda now: now <= before, what="files are left open")


def own_ranks() -> list[int]:
    return ranks_of(os.getpid(), PROGRAM)


def started_ranks(first: int, count: int = 1) -> list[int]:
    """Return the ranks of a process. A program that has just started has no name yet."""
    return await_value(lambda: ranks_of(first, PROGRAM), lambda found: len(found) == count)


def begin(processes: RankProcesses) -> None:
    fd = os.memfd_create("KV")
    try:
        processes.begin(1, fd)
    finally:
        os.close(fd)


def test_ranks_start_and_end_with_the_first_one(start: Start) -> None:
    processes = start("good", num_ranks=3)
    processes.wait_until_loaded()
    begin(processes)
    processes.check()

    ranks = started_ranks(os.getpid(), 2)
    processes.close()
    processes.close()
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)  # no zombies, too


def test_a_rank_killed_while_it_loads_ends_the_start(start: Start) -> None:
    ended = SimpleQueue[int]()
    processes = start("slow", num_ranks=3, on_end=ended.put)

    os.kill(started_ranks(os.getpid(), 2)[1], signal.SIGKILL)

    with pytest.raises(ProcessLost, match="rank 2 of this node was ended by SIGKILL"):
        processes.wait_until_loaded()  # for the first one, which goes on
    assert ended.get() == 2


def test_the_first_rank_sees_faults_while_it_loads_its_own_weights(start: Start) -> None:
    processes = start("faulty")

    def fault() -> Exception | None:
        try:
            processes.check()
        except ModelError as error:
            return error
        return None

    assert str(await_value(fault)) == "rank 1: no tensors"


def test_a_rank_killed_before_it_gets_the_kv_cache_ends_the_start(start: Start) -> None:
    processes = start("good")
    processes.wait_until_loaded()

    os.kill(started_ranks(os.getpid())[0], signal.SIGKILL)

    with pytest.raises(RunnerLost, match="rank 1"):
        begin(processes)


def test_a_loss_is_reported_once_also_to_who_asks_later(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    processes = start("good", num_ranks=3)
    processes.wait_until_loaded()
    begin(processes)
    lost: Future[Exception] = Future()
    processes.when_lost(lost.set_result)  # raises in the thread if it is called twice

    for rank in started_ranks(os.getpid(), 2):
        os.kill(rank, signal.SIGKILL)

    reported = lost.result()
    later: list[Exception] = []
    processes.when_lost(later.append)
    assert later == [reported]
    processes.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"{reported}: the node cannot go on"
    ]


def test_a_rank_that_hangs_is_ended_once_it_has_been_silent_for_too_long(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes_module, "WATCH_EVERY_S", 0.01)
    beats, heard = iter([None, 1, 2, 2, None, 2, *[2] * 6]), list[int | None]()

    def beat(rank: int) -> int | None:
        heard.append(next(beats))
        return heard[-1]

    ended: Future[int] = Future()
    lost: Future[Exception] = Future()
    processes = start("good", on_end=ended.set_result, watch=RankWatch(beat, 0.045))
    processes.when_lost(lost.set_result)
    [rank] = started_ranks(os.getpid())

    os.kill(rank, signal.SIGSTOP)

    assert isinstance(lost.result(), ProcessLost)
    assert str(lost.result()) == "rank 1 of this node hangs: no sign of life for 0.045 s"
    assert ended.result() == 1
    assert heard == [None, 1, 2, 2, None, 2, 2, 2, 2, 2, 2]
    await_value(lambda: not is_running(rank))


def test_a_bug_in_a_start_is_named_and_logged(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    processes = start("large")

    with pytest.raises(RunnerLost, match="rank 1 of this node cannot start: MemoryError"):
        processes.wait_until_loaded()

    [record] = caplog.records
    assert record.getMessage().startswith("rank 1: the start failed\nTraceback")


def test_each_rank_loads_its_part_of_an_adapter(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="baton"):
        processes = start("good", num_ranks=3)
        processes.wait_until_loaded()
        begin(processes)
        caplog.clear()

        processes.load_adapter(0, ["a", "b"])
        with pytest.raises(ModelError, match=r"rank 1 .* cannot load an adapter: MemoryError"):
            processes.load_adapter(1, ["too large", "b"])
        processes.load_adapter(2, ["c", "d"])
        processes.drop_adapter(0)

        def logged() -> set[str]:
            return {each.message for each in caplog.records if each.levelno == logging.INFO}

        await_value(lambda: len(logged()) == 8)
        assert logged() == {
            *("rank 1: adapter 0: a", "rank 2: adapter 0: b"),
            *("rank 1: adapter 1: too large", "rank 2: adapter 1: b"),
            *("rank 1: adapter 2: c", "rank 2: adapter 2: d"),
            *("rank 1: no adapter 0", "rank 2: no adapter 0"),
        }
    os.kill(started_ranks(os.getpid(), 2)[1], signal.SIGKILL)
    for number in (3, 4):  # it does not wait for a rank that has ended
        with pytest.raises(ProcessLost, match="rank 2"):
            processes.load_adapter(number, ["a", "b"])


def test_ranks_log_as_their_node_does(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    start("good").wait_until_loaded()
    assert caplog.records == []
    with caplog.at_level(logging.INFO, logger="baton"):
        start("good").wait_until_loaded()

    own = [each for each in caplog.record_tuples if each[0] == "baton.rank"]  # not of a slow start
    assert own == [("baton.rank", logging.INFO, "rank 1: loading good")]


def test_a_program_that_cannot_run_is_a_named_error(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/no/python")
        with pytest.raises(InvalidConfig, match=r"rank 1 cannot be started: .*/no/python"):
            start("good")
    with pytest.raises(RunnerLost, match="has ended with exit code 1"):
        start("good", program="no_such_module").wait_until_loaded()


def test_signals_for_all_processes_of_a_node_are_left_to_the_first_rank(start: Start) -> None:
    processes = start("good")
    processes.wait_until_loaded()
    [rank] = started_ranks(os.getpid())

    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(rank, number)

    begin(processes)
    assert os.getsid(rank) == rank  # Ctrl-C in a terminal does not reach it


def test_a_rank_runs_on_its_cpus_alone(start: Start) -> None:
    one = max(os.sched_getaffinity(0))
    start("good", cpus=[None, frozenset({one})]).wait_until_loaded()

    assert os.sched_getaffinity(started_ranks(os.getpid())[0]) == {one}


def test_a_stopped_rank_is_ended(start: Start) -> None:
    processes = start("good")
    processes.wait_until_loaded()
    [rank] = started_ranks(os.getpid())

    os.kill(rank, signal.SIGSTOP)
    processes.close()

    assert not is_running(rank)


def test_ranks_outlive_the_thread_that_starts_them(start: Start) -> None:
    started: Future[RankProcesses] = Future()
    thread = threading.Thread(target=lambda: started.set_result(start("good")))
    thread.start()
    thread.join()

    processes = started.result()
    processes.wait_until_loaded()
    begin(processes)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_fork_does_not_end_ranks(start: Start) -> None:
    processes = start("good")
    child = os.fork()
    if not child:
        processes.close()
        os._exit(0)
    os.waitpid(child, 0)

    processes.wait_until_loaded()
    begin(processes)


STARTS = """
import signal
import sys
from tests.support.open_files import open_files
from tests.support.rank_processes import start_ranks
processes = start_ranks(sys.argv[1])
if sys.argv[1] != "slow":
    processes.wait_until_loaded()
print("started", flush=True)
signal.pause()
"""


@pytest.mark.parametrize(
    ("model", "is_stopped"), [("slow", False), ("good", False), ("good", True)]
)
def test_no_rank_survives_the_first_one(model: str, is_stopped: bool) -> None:
    command = [sys.executable, "-c", STARTS, model]
    with running_program(command, is_forked=False) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "started\n"
        [rank] = started_ranks(first.pid)
        if is_stopped:
            os.kill(rank, signal.SIGSTOP)

        first.kill()

        await_value(lambda: not is_running(rank))


WAITS = """
from baton.rpc.process_end import exit_on_sigterm
from tests.support.open_files import open_files
from tests.support.rank_processes import start_ranks
exit_on_sigterm()
processes = start_ranks("slow")
try:
    print("started", flush=True)
    processes.wait_until_loaded()
finally:
    processes.close()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_start_that_waits_for_a_rank_can_be_ended(number: signal.Signals) -> None:
    with running_program([sys.executable, "-c", WAITS], is_forked=False) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "started\n"
        [rank] = started_ranks(first.pid)

        first.send_signal(number)

        assert first.wait() in (128 + signal.SIGTERM, -signal.SIGINT)
        assert not is_running(rank)
