"""Honest client whose answers must stay the same while other clients attack the cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from baton.client import Client, Generation
from baton.cluster import LocalCluster
from baton.core.sampling import SamplingParams
from tests.support.client_load import ClientRequest, Load
from tests.support.models import prompt_of
from tests.support.nodes import await_all_free

HONEST_REQUEST = ClientRequest(
    prompt_of(40), Generation(SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
)
PAUSE_S = 0.4  # leaves the cores to the attacks


@contextmanager
def honest_client_undisturbed(
    cluster: LocalCluster, right_answer: tuple[int, ...]
) -> Iterator[None]:
    """Check the client's answers during and after the block, and that nothing leaks."""
    with Load(cluster.address, [HONEST_REQUEST], num_clients=1, pause_s=PAUSE_S) as load:
        yield
    assert load.errors == []
    assert {reported.token_ids for reported in load.answers} <= {right_answer}
    with Client(cluster.address, timeout_s=60) as client:
        answer = client.generate(HONEST_REQUEST.prompt, HONEST_REQUEST.generation)
    assert tuple(answer.token_ids) == right_answer
    assert [child.process.poll() for child in cluster.children] == [None] * 3
    for child in (*cluster.prefills, *cluster.decodes):
        await_all_free(child.address)
