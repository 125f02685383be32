"""Dynamo's indexer of KV events finds the same prefixes as the node's own names.

It runs if BATON_DYNAMO_PYTHON is a Python with `ai-dynamo-runtime`.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from baton.engine.events import AllBlocksCleared, BlockRemoved, BlockStored
from baton.engine.kv_cache.block_hashes import BlockHash, block_hashes
from baton.node.kv.events.config import KvEventsConfig
from baton.node.kv.events.messages import CacheFacts
from baton.node.kv.events.publisher import KvEventPublisher
from tests.support.child_programs import running_program
from tests.support.ports import free_port
from tests.support.waits import await_value

PYTHON = os.environ.get("BATON_DYNAMO_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="BATON_DYNAMO_PYTHON has no ai-dynamo-runtime"),
]

MODEL, BLOCK_SIZE, PATIENCE_S = "m", 4, 30.0
ROOT, SALTED = BlockHash(b"u" * 16), BlockHash(b"s" * 16)
FACTS = CacheFacts(BLOCK_SIZE, lambda _: ROOT, "full_attention")
TOKENS = tuple(range(100, 100 + 8 * BLOCK_SIZE))
EARLY, LATE = 1, 2


@dataclass(frozen=True, slots=True)
class DynamoIndexer:
    port: int

    def post(self, path: str, **body: Any) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            headers = {"content-type": "application/json"}
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            whole = response.read()
            assert response.status < 300, whole
            return json.loads(whole)
        finally:
            connection.close()

    def follow(self, number: int, config: KvEventsConfig) -> None:
        self.post(
            "/register",
            instance_id=number,
            endpoint=config.endpoint,
            replay_endpoint=config.replay_endpoint,
            model_name=MODEL,
            block_size=BLOCK_SIZE,
        )

    def num_tokens(self, number: int, **query: str) -> int:
        found = self.post("/query", token_ids=TOKENS, model_name=MODEL, **query)
        return int(found["scores"].get(str(number), {}).get("0", 0))

    def is_ready(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) == 0


@contextmanager
def dynamo_indexer() -> Iterator[DynamoIndexer]:
    indexer = DynamoIndexer(free_port())
    command = (PYTHON, "-m", "dynamo.indexer", "--port", str(indexer.port))
    with running_program(command, is_forked=False):
        await_value(indexer.is_ready, what="a reply of the indexer")
        yield indexer


def stored(num_blocks: int, root: BlockHash = ROOT) -> BlockStored:
    tokens = TOKENS[: num_blocks * BLOCK_SIZE]
    return BlockStored(
        tuple(block_hashes(tokens, BLOCK_SIZE, root)), None, tokens, BLOCK_SIZE, root
    )


def test_the_indexer_has_the_prefixes_of_a_node_early_and_late(tmp_path: Path) -> None:
    config = KvEventsConfig(f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay", buffer_steps=2)
    names = block_hashes(TOKENS, BLOCK_SIZE, ROOT)
    salt = SALTED.hex()
    with KvEventPublisher(config, FACTS) as publisher, dynamo_indexer() as indexer:
        indexer.follow(EARLY, config)

        def await_blocks(number: int, num_blocks: int, **query: str) -> None:
            wanted = num_blocks * BLOCK_SIZE
            await_value(lambda: indexer.num_tokens(number, **query) == wanted, what=f"{num_blocks}")

        publisher.publish([stored(8)])
        await_blocks(EARLY, 8)
        publisher.publish([BlockRemoved((names[5],))])
        await_blocks(EARLY, 5)
        publisher.publish([stored(3, SALTED)])
        await_blocks(EARLY, 3, cache_salt=salt)
        assert indexer.num_tokens(EARLY) == 5 * BLOCK_SIZE
        for number in range(4):  # the first messages leave the buffer
            publisher.publish([BlockRemoved((names[7 - number // 2],))])

        indexer.follow(LATE, config)
        publisher.publish([BlockRemoved((names[4],))])
        for number in (EARLY, LATE):
            await_blocks(number, 4)
            await_blocks(number, 3, cache_salt=salt)

        publisher.publish([AllBlocksCleared()])
        for number in (EARLY, LATE):
            await_blocks(number, 0)
        publisher.publish([stored(2)])
        for number in (EARLY, LATE):
            await_blocks(number, 2)
