"""Collective operations of ranks, here threads of one process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from baton.engine.errors import ProcessLost, RunnerLost
from baton.engine.runner.kernels.build import best_variant, cpu_features, library
from baton.engine.runner.kernels.calls import Kernels
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.rank_group import Shard
from baton.engine.runner.ranks import measuring
from baton.engine.runner.ranks.leading import LeadingLinks
from baton.engine.runner.ranks.links import BUFFER_BYTES, RankLinks, links_bytes, make_shared_memory
from tests.support.waits import await_value

Result = TypeVar("Result")


def links_of(num_ranks: int, patience_s: float | None = None) -> list[RankLinks]:
    kernels = Kernels(library(best_variant(cpu_features())), 1)
    memory, fd = make_shared_memory("test", links_bytes(kernels, num_ranks))
    os.close(fd)
    leading = LeadingLinks(kernels, memory, Shard(0, num_ranks))
    first = leading if patience_s is None else RankLinks(kernels, memory, leading.shard, patience_s)
    others = range(1, num_ranks)
    return [first, *(RankLinks(kernels, memory, Shard(rank, num_ranks)) for rank in others)]


def in_all(links: list[RankLinks], call: Callable[[RankLinks], Result]) -> list[Result]:
    with ThreadPoolExecutor(len(links)) as threads:
        return list(threads.map(call, links))


def exchange(links: RankLinks, message: object) -> object:
    """Send a message in the first rank, and return it in the others."""
    if links.shard.rank:
        return links.receive()
    links.send(message)
    return None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_the_same_in_all_ranks(dtype: torch.dtype) -> None:
    for count in (1, 17, BUFFER_BYTES + 3):
        parts = torch.randn(3, count, generator=torch.Generator().manual_seed(count)).to(dtype)

        def add(links: RankLinks, parts: Tensor = parts) -> Tensor:
            return links.all_reduce(parts[links.shard.rank].clone())

        first, *others = in_all(links_of(3), add)

        wanted = parts.float().unbind()
        assert torch.equal(first, (wanted[0] + wanted[1] + wanted[2]).to(dtype))
        assert all(torch.equal(first, other) for other in others)


def test_the_time_of_calls_is_added_up() -> None:
    links = links_of(2)
    assert [each.spent_s for each in links] == [0.0, 0.0]

    in_all(links, RankLinks.meet)

    assert all(each.spent_s > 0 for each in links)


def test_messages_of_any_size_reach_all_ranks() -> None:
    message = [b"0" * size for size in (0, 1, 3 * BUFFER_BYTES)]

    assert in_all(links_of(3), lambda links: exchange(links, message)) == [None, message, message]


def test_a_rank_that_hangs_is_not_waited_for_longer_than_that() -> None:
    first, _ = links_of(2, patience_s=0.2)

    with pytest.raises(ProcessLost, match=r"rank 1 of this node hangs: nothing for 0\.2 s"):
        first.meet()


def test_a_measurement_waits_for_the_start_of_its_second_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measuring, "PATIENCE_S", 0.5)  # which importing torch exceeds

    assert measuring.median_sum_s(library(best_variant(cpu_features())), 64) > 0


def test_a_measurement_whose_second_process_cannot_start_fails_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "false")

    with pytest.raises(ProcessLost, match="second process of the measurement has ended"):
        measuring.median_sum_s(library(best_variant(cpu_features())), 64)


def test_a_rank_shows_that_it_waits() -> None:
    first, other = links_of(2)

    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(other.receive)
        before = first.beats(1)
        await_value(lambda: first.beats(1) > before)
        first.send("anything")
        waiting.result()

    before = first.beats(1)
    in_all([first, other], RankLinks.meet)
    assert first.beats(1) > before


def test_no_rank_waits_for_one_that_has_ended() -> None:
    links = links_of(3)
    links[0].end(2)

    def meet(each: RankLinks) -> str:
        with pytest.raises(RunnerLost) as raised:
            each.meet()
        return str(raised.value)

    assert set(in_all(links[:2], meet)) == {"rank 2 of this node has ended"}


def test_a_product_that_fails_in_the_first_rank_ends_it() -> None:
    """The others wait for it: nothing may be exchanged with them as if it had not begun."""
    links = links_of(2)

    class _Failing(Linear):
        def __call__(self, hidden_states: Tensor) -> Tensor:
            raise MemoryError

        def rows(self, row_ids: Tensor) -> Tensor:
            raise NotImplementedError

    def follow(rank: RankLinks) -> None:
        rank.receive()
        rank.broadcast(torch.empty(1, 4))

    def multiply(rank: RankLinks) -> str:
        with pytest.raises(RunnerLost) as raised:
            rank.multiply(_Failing(), torch.zeros(1, 4), 8)
        return str(raised.value)

    assert "MemoryError" in str(
        in_all(links, lambda rank: (multiply, follow)[rank.shard.rank](rank))
    )


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_fork_cannot_disturb_the_ranks() -> None:
    links = links_of(2)
    child = os.fork()
    if not child:
        try:
            links[0].send("of the fork")
        except RunnerLost:
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)

    assert status == 0
    assert in_all(links, lambda rank: exchange(rank, 1)) == [None, 1]
