"""A client whose prompts fill the KV cache of a prefill node does not stop those of others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from baton.client import AsyncClient, Generation
from baton.cluster import LocalCluster
from baton.core.sampling import SamplingParams
from baton.rpc.node_info import NodeLoad
from tests.support.client_load import ClientRequest, stream_answer
from tests.support.models import prompt_of
from tests.support.nodes import await_all_free, await_load, card_at
from tests.support.suspended_processes import suspended

NUM_PROMPTS = 31  # more than fit into the cache, and fewer than the decode node runs
MANY = Generation(SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True), cache_salt="many")
ONE = replace(MANY, cache_salt="one")


def test_a_bystander_is_computed_while_the_hand_offs_of_another_client_fill_the_cache(
    cluster: LocalCluster,
) -> None:
    prefill, decode = cluster.prefills[0], cluster.decodes[0]
    is_full = fills(card_at(prefill.address).num_blocks)

    async def scenario() -> None:
        async with AsyncClient(cluster.address, timeout_s=60) as client:
            # No hand-off ends while the decode node grants nothing.
            with suspended(decode):
                many = [
                    ClientRequest(prompt_of(300, seed=7_000 + n), MANY) for n in range(NUM_PROMPTS)
                ]
                answers = [stream_answer(client, each) for each in many]
                streams = [asyncio.ensure_future(each) for each in answers]
                await asyncio.to_thread(await_load, prefill.address, is_full)
                async for chunk in client.stream(prompt_of(400, seed=6_999), ONE):
                    assert chunk.token_ids
                    break
                for each in streams:
                    each.cancel()
            await asyncio.gather(*streams, return_exceptions=True)

    asyncio.run(scenario())
    for child in (prefill, decode):
        await_all_free(child.address)


def fills(num_blocks: int) -> Callable[[NodeLoad], bool]:
    """Return a test of whether prompts wait although none is computed."""

    def is_full(load: NodeLoad) -> bool:
        is_idle = load.num_waiting > 0 and not load.num_running
        return is_idle and load.num_free_blocks < num_blocks / 2

    return is_full
