"""KV events of a real cluster: a subscriber knows exactly what is cached, also one that is late."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from baton.client import AsyncClient, Client, Generation
from baton.cluster import Child, ClusterOptions, LocalCluster
from baton.core.sampling import SamplingParams
from baton.engine.kv_cache.block_hashes import BlockHash, block_hashes
from baton.node.kv.events.messages import SALT_KEY_PREFIX, HashFormat
from tests.support.models import prompt_of
from tests.support.nodes import card_at, prefixes_at
from tools.follow_kv_events import KvEventFollower

pytestmark = pytest.mark.slow

SAMPLING = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
PATIENCE_MS = 30_000
encode = HashFormat.INT.encode
NUM_PROMPTS = 10  # more than the small KV caches hold


@pytest.fixture
def cluster(
    cluster_options: Callable[..., ClusterOptions], tmp_path: Path
) -> Iterator[LocalCluster]:
    node_arguments = (
        *("--kv-cache-memory", "256KiB", "--threads", "1", "--max-num-seqs", "4"),
        # Events are of the KV cache alone: nodes report what they have in tiers to routers, too.
        *("--kv-host-memory", "0"),
        *("--kv-events-endpoint", f"ipc://{tmp_path}/{{node_id}}"),
        *("--kv-events-replay-endpoint", f"ipc://{tmp_path}/{{node_id}}-replay"),
        *("--kv-events-buffer-steps", "5"),
    )
    options = replace(cluster_options(), node_arguments=node_arguments)
    with LocalCluster(options) as running:
        yield running


def following(node: Child, folder: Path) -> KvEventFollower:
    return KvEventFollower(f"ipc://{folder}/{node.name}", f"ipc://{folder}/{node.name}-replay")


def generate(cluster: LocalCluster, num_prompts: int, *, salt: str = "") -> None:
    with Client(cluster.address, timeout_s=60) as client:
        for seed in range(num_prompts):
            prompt = prompt_of(100, seed=seed)
            client.generate(prompt, Generation(SAMPLING, cache_salt=salt))


def reset(cluster: LocalCluster) -> None:
    async def call() -> None:
        async with AsyncClient(cluster.address) as client:
            await client.reset_prefix_caches()

    asyncio.run(call())


def catch_up(follower: KvEventFollower, node: Child) -> None:
    """Read events until the follower has the names that the node reports to routers."""
    follower.catch_up()
    while follower.view.blocks.keys() != {encode(name) for name in prefixes_at(node.address)}:
        assert follower.receive(PATIENCE_MS), "what the node published is not what it reports"


def check_tokens(follower: KvEventFollower, node: Child) -> set[str]:
    """Check that each name is the hash of the block's tokens. Returns the keys of salts."""
    naming = card_at(node.address).prefix_naming
    assert naming is not None
    names = {encode(name): name for name in prefixes_at(node.address)}
    salts = set()
    for name, block in follower.view.blocks.items():
        parent = block.parent
        if parent is None:
            [key] = block.extra_keys or [""]
            salts.add(key)
            digest = key.removeprefix(SALT_KEY_PREFIX)
            root = BlockHash(bytes.fromhex(digest)) if key else naming.root()
        else:
            assert block.extra_keys is None
            assert isinstance(parent, int)
            root = names[parent]
        assert block_hashes(block.token_ids, naming.block_size, root) == [names[name]]
    return salts


def test_subscribers_have_the_content_of_the_caches_of_both_nodes(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    nodes = [*cluster.prefills, *cluster.decodes]
    with ExitStack() as stack:
        early = [stack.enter_context(following(node, tmp_path)) for node in nodes]
        generate(cluster, NUM_PROMPTS)
        generate(cluster, 2, salt="secret of a tenant")
        late = [stack.enter_context(following(node, tmp_path)) for node in nodes]

        for node, follower in zip(nodes * 2, early + late, strict=True):
            catch_up(follower, node)
            assert len(follower.view.blocks) > 6
            assert len(check_tokens(follower, node)) == 2  # with and without a salt
        assert all(follower.view.num_removed for follower in early)
        assert [one.view.blocks for one in late] == [one.view.blocks for one in early]

        reset(cluster)
        for follower in early:
            while follower.view.blocks:
                assert follower.receive(PATIENCE_MS), "the reset was not published"

        generate(cluster, 1)
        for node, follower in zip(nodes * 2, early + late, strict=True):
            catch_up(follower, node)
            assert follower.view.num_cleared
            assert len(check_tokens(follower, node)) == 1
