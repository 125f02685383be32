"""Scaling under continuous load: two prefill and two decode nodes leave and return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from baton.client import Generation
from baton.cluster import Child, ClusterOptions, LocalCluster
from baton.core.sampling import SamplingParams
from baton.llm import LLM
from tests.support.client_load import ClientAnswer, ClientRequest, Load, answer_all
from tests.support.models import prompt_of, reference_choices

NUM_TOKENS = 24
ROLES = ("prefill", "decode")


def greedy(max_tokens: int = NUM_TOKENS) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


class ChangingCluster(LocalCluster):
    """Cluster whose nodes can be added and removed."""

    def add_node(self, role: str, child: Child) -> None:
        nodes_of(self, role).append(child)
        self.list_nodes(role)

    def remove_node(self, child: Child) -> int:
        """Unlist a node, drain it and return its exit code."""
        role = "prefill" if child in self.prefills else "decode"
        nodes_of(self, role).remove(child)
        self.list_nodes(role)
        return child.stop()


@pytest.fixture(scope="module")
def cluster(
    cluster_options: Callable[..., ClusterOptions],
) -> Iterator[ChangingCluster]:
    options = cluster_options(
        num_prefill=2,
        num_decode=2,
        # Every node gets its share of the requests, wherever their prefixes are cached.
        router_arguments=(
            *("--find-every-s", "0.1"),
            *("--policy", "round_robin"),
            *("--local-prefill-below", "0"),
        ),
    )
    with ChangingCluster(options) as running:
        yield running


@pytest.mark.parametrize("num_prompts", [16, 80])
def test_concurrent_prompts_get_the_same_answers_as_alone(
    cluster: LocalCluster, local: LLM, num_prompts: int
) -> None:
    requests = [
        ClientRequest(
            (3 + number, *prompt_of(20 + number % 40, seed=num_prompts)), Generation(greedy(6))
        )
        for number in range(num_prompts)
    ]

    reported = answer_all(cluster.address, requests)

    alone = [local.generate(request.prompt, greedy(6))[0].token_ids for request in requests]
    assert [list(one.token_ids) for one in reported] == alone
    assert all(one.finish.served.is_prefill_remote for one in reported)
    assert all(one.finish.served.prompt_tokens_computed_on_decode == 0 for one in reported)


@pytest.mark.slow
def test_nodes_join_and_leave_under_load_and_every_answer_is_complete_and_correct(
    cluster: ChangingCluster, model_folder: Path
) -> None:
    requests = [
        ClientRequest(prompt_of(30 + 7 * number, seed=3), Generation(greedy()))
        for number in range(12)
    ]
    with ThreadPoolExecutor(2) as both:
        moved = list(both.map(partial(start_moved, cluster), ROLES))
        with Load(cluster.address, requests, num_clients=2) as load:
            codes = list(both.map(partial(come_and_go, cluster, load), ROLES, moved))

    assert load.errors == []
    assert codes == [0, 0]
    for reported in load.answers:
        answer = list(reported.token_ids)
        assert answer == reference_choices(
            model_folder, reported.request.prompt, answer, NUM_TOKENS
        )


def start_moved(cluster: LocalCluster, role: str) -> Child:
    """Start the successor of the second node, at another address."""
    _, second = nodes_of(cluster, role)
    return cluster.start_node(role, name=second.name)


def come_and_go(cluster: ChangingCluster, load: Load, role: str, moved: Child) -> int:
    """Kill and restart the first node at its address; drain the second one and replace it."""
    first, second = nodes_of(cluster, role)
    load.until(served_by(second))
    first.process.kill()
    first.process.wait()
    cluster.remove_node(first)
    back = cluster.start_node(role, name=first.name, port=port_of(first))
    cluster.add_node(role, back)
    load.until(served_by(back))
    code = cluster.remove_node(second)
    cluster.add_node(role, moved)
    load.until(served_by(moved))
    return code


def nodes_of(cluster: LocalCluster, role: str) -> list[Child]:
    return cluster.prefills if role == "prefill" else cluster.decodes


def served_by(child: Child) -> Callable[[ClientAnswer], bool]:
    return lambda reported: (
        child.name
        in (
            reported.finish.served.prefill_node,
            reported.finish.served.decode_node,
        )
    )


def port_of(child: Child) -> int:
    return int(child.address.rpartition(":")[2])
