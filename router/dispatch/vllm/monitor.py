"""Watches vLLM servers: health, load, and checks together with each decode node."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import PurePath

from baton.core.errors import NamedError
from baton.core.ids import ModelVariant
from baton.router.dispatch.node_rpcs import NodeCalls
from baton.router.dispatch.vllm.http_api import ServerFailed
from baton.router.dispatch.vllm.pair_check import PairVerdict, check_pair
from baton.router.dispatch.vllm.servers import PrefillServer, PrefillServers, key_of, read_load
from baton.router.input_processing.model_profiles import ModelProfiles
from baton.router.routing.nodes import Node
from baton.router.values import TextPrompt

POLL_INTERVAL_S = 1.0
HEALTH_TIMEOUT_S = 5.0
RETRY_CHECK_S = 10.0
MIN_CHECK_TOKENS, MAX_CHECK_TOKENS = 65, 256  # more than a few blocks
TEXT = """\
The harbour was quiet that morning. Two boats had left before sunrise, and the third one, which \
belonged to a man called Elias Brandt, was still tied to the pier because its engine would not \
start. He had bought it in 1987 for 4,200 crowns. "Give me the wrench," he said, "and hold the \
lamp a little higher." A few minutes later, the noise of the motor filled the bay:

def total(prices):
    return sum(price * 1.25 for price in prices)

Zwei Kinder liefen am Wasser entlang und zählten die Möwen. Il faisait encore froid. The chemical \
formula of water is H2O, light travels about 300,000 kilometres in a second, and the capital of \
Portugal is Lisbon, which is older than Rome.
"""

log = logging.getLogger(__name__)


@asynccontextmanager
async def monitoring(
    servers: PrefillServers, profiles: ModelProfiles, node_calls: NodeCalls
) -> AsyncIterator[None]:
    """Watch the servers until the end of the block."""
    monitors = [ServerMonitor(server, servers, profiles, node_calls) for server in servers.all]
    tasks = [asyncio.ensure_future(monitor.run()) for monitor in monitors]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True, eq=False)
class ServerMonitor:
    server: PrefillServer
    servers: PrefillServers
    profiles: ModelProfiles
    node_calls: NodeCalls

    async def run(self) -> None:
        # A check takes as long as a few prompts.
        await asyncio.gather(self._repeat(self.poll), self._repeat(self.check_nodes))

    async def _repeat(self, do: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await do()
            except Exception:
                log.exception("bug in the watch of %s", self.server.address)
            await asyncio.sleep(POLL_INTERVAL_S)

    async def poll(self) -> None:
        """Read the server's health and load."""
        server = self.server
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await server.api.get_text("/health")
                if server.trouble:
                    await self._read_model()
                server.load = read_load(await server.api.get_text("/metrics"))
        except (ServerFailed, OSError, TimeoutError) as error:
            trouble = str(error) or repr(error)
            if trouble != server.trouble:
                log.warning("%s cannot be used: %s", server.address, trouble)
            server.note_gone(trouble)

    async def _read_model(self) -> None:
        """Read the names of the model that a healthy server has."""
        server = self.server
        listed = (await server.api.get("/v1/models")).get("data")
        if not isinstance(listed, list) or not listed or not isinstance(listed[0], dict):
            raise ServerFailed("it lists no model")
        server.model = str(listed[0].get("id") or "")
        server.root = str(listed[0].get("root") or "")
        server.version = str((await server.api.get("/version")).get("version") or "")
        self.servers.note_success(server)
        server.trouble = ""
        log.info("%s serves %s with vLLM %s", server.address, server.model, server.version)

    async def check_nodes(self) -> None:
        """Check the server with each decode node that it was not checked with."""
        server = self.server
        nodes = {key_of(node): node for node in self.servers.decode_nodes()}
        for key in server.mismatches.keys() - nodes.keys():
            del server.mismatches[key]
        for key, node in nodes.items():
            if server.trouble or key in server.mismatches:
                continue
            found = await self._check(node)
            if found is None:
                return
            self._note_verdict(node, found)

    async def _check(self, node: Node) -> PairVerdict | None:
        """Return the verdict about a node; None if there is none yet."""
        server = self.server
        if not is_name_of(node.card.model, server.model, server.root):
            reason = f"it serves {server.model}, and the node {node.card.model}"
            return PairVerdict(server.engine_id, reason)
        text = self._text(node)
        try:
            return await check_pair(server.api, server.model, node, self.node_calls, text)
        except (ServerFailed, NamedError, OSError, TimeoutError) as error:
            log.warning("no check of %s with %s: %r", server.address, node.address, error)
            self.servers.note_failure(server, f"no check with {node.address}: {error!r}")
            await asyncio.sleep(RETRY_CHECK_S)
            return None

    def _note_verdict(self, node: Node, found: PairVerdict) -> None:
        server = self.server
        if server.engine_id and server.engine_id != found.engine_id:
            server.mismatches.clear()  # it has restarted
        server.engine_id = found.engine_id
        server.mismatches[key_of(node)] = found.mismatch
        names = server.address, node.card.node_id, node.address
        if found.mismatch:
            log.error("%s is not used with decode node %s at %s: %s", *names, found.mismatch)
        else:
            self.servers.note_success(server)
            log.info("%s is used with decode node %s at %s", *names)

    def _text(self, node: Node) -> tuple[int, ...]:
        """Return the tokens to compute: a text, or without a tokenizer, tokens of any kind."""
        card = node.card
        boundary = self.profiles.of(ModelVariant(card.model)).text
        try:
            token_ids = boundary.token_ids(TextPrompt(TEXT))
        except NamedError:
            token_ids = tuple(range(card.vocab_size))
        token_ids = tuple(islice(cycle(token_ids), max(MIN_CHECK_TOKENS, len(token_ids))))
        return token_ids[: min(MAX_CHECK_TOKENS, card.max_sequence_length - 1)]


def is_name_of(model: str, served: str, root: str) -> bool:
    """Return whether a node's model has the name of a server's, or that of its folder."""
    return model in {served, PurePath(served).name, root, PurePath(root).name}
