"""Watches vLLM servers: health, load, and checks together with each decode node."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import PurePath
from statistics import fmean
from typing import Any

from baton.core.errors import InvalidRequest, NamedError
from baton.core.foreign_kv import ForeignKv
from baton.core.ids import HandoffId, ModelVariant
from baton.core.kv_hints import RELEASED
from baton.core.legs import LegKind
from baton.core.request import EngineRequest
from baton.core.sampling import SamplingParams
from baton.router.dispatch.node_rpcs import LegEvent, LegOutput, NodeCalls
from baton.router.dispatch.vllm.http_api import ServerFailed, VllmApi, ask, kv_of
from baton.router.dispatch.vllm.servers import PrefillServer, PrefillServers, key_of, read_load
from baton.router.input_processing.model_profiles import ModelProfiles
from baton.router.routing.policy import Leg
from baton.router.routing.served_models import Node
from baton.router.values import TextPrompt
from baton.rpc.messages.calls import node_request_id

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
CHECK_S = 120.0
NUM_TOP = 20
MAX_TEXT_APART = 0.15  # mean difference of the text's logprobs
MAX_NEXT_APART = 0.3  # mean difference of the next tokens' logprobs
SOURCE = "vllm"  # of loaded tokens


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


@dataclass(frozen=True, slots=True)
class PairVerdict:
    """Check of a vLLM server together with a decode node, before the node uses its KV.

    vLLM's parameters name a model, not its weights, and a server on a CPU does not say how it packs
    KV. So both compute one text, and the node reads the server's KV of it:

    - The logprobs of the text must be close: otherwise the weights differ.
    - The most likely next tokens must have close logprobs with the server's KV and without:
      otherwise the node takes it for something else.

    With SmolLM2-135M in bfloat16 and vLLM 0.32, the text differs by 0.05 on average; with the
    node's weights in int8 by 0.10, in int4 by 0.62, and with noise of 3 % in the weights by 0.28.
    Smaller changes of the weights pass.
    """

    engine_id: str
    mismatch: str = ""  # empty: the pair fits


@dataclass(slots=True)
class _Answer:
    """Reply of a node to the text."""

    prompt_logprobs: list[float] = field(default_factory=list)
    next_tokens: Mapping[int, float] = field(default_factory=dict)
    num_loaded: int = 0  # tokens of the text, from the server

    def take(self, event: LegEvent) -> None:
        if not isinstance(event, LegOutput):
            return
        if event.report is not None:
            self.num_loaded = event.report.prompt_tokens_loaded.get(SOURCE, self.num_loaded)
        for output in event.outputs:
            self.prompt_logprobs += [each.logprob for each in output.prompt_logprobs if each]
            for each in output.logprobs[:1]:
                self.next_tokens = dict(each.top)


async def check_pair(
    api: VllmApi, model: str, node: Node, node_calls: NodeCalls, token_ids: Sequence[int]
) -> PairVerdict:
    """Compute a text on both. Raises ServerFailed, OSError, and named errors of the node."""
    async with asyncio.timeout(CHECK_S):
        computed = await _compute(node, node_calls, token_ids)
        reply = await ask(api, model, token_ids, prompt_logprobs=0)
        kv = kv_of(reply)
        apart = mean_apart(_prompt_logprobs(reply, token_ids), computed.prompt_logprobs)
        try:
            read = await _compute(node, node_calls, token_ids, kv)
        except InvalidRequest as error:  # the node does not know the server
            return PairVerdict(kv.engine_id, str(error))
    if apart > MAX_TEXT_APART:
        return PairVerdict(
            kv.engine_id,
            f"other weights: logprobs of a text are {apart:.2f} apart on average, and at most "
            f"{MAX_TEXT_APART} is normal",
        )
    return PairVerdict(kv.engine_id, _find_misread(node, computed, read, len(token_ids)))


def _find_misread(node: Node, computed: _Answer, read: _Answer, num_tokens: int) -> str:
    """Return why a node's reads from the server are of no use; empty if they are."""
    block_size = node.card.fingerprint.layout.block_size
    if read.num_loaded != (num_tokens - 1) // block_size * block_size:
        return (
            f"the node read KV of {read.num_loaded} tokens of {num_tokens}: its log says why "
            "(--kv-sources)"
        )
    next_apart = next_tokens_apart(computed.next_tokens, read.next_tokens)
    if next_apart > MAX_NEXT_APART:
        return (
            f"the node does not read the server's KV as it is: logprobs of the next token are "
            f"{next_apart:.2f} apart on average (packing= in --kv-sources)"
        )
    return ""


async def _compute(
    node: Node, node_calls: NodeCalls, token_ids: Sequence[int], kv: ForeignKv | None = None
) -> _Answer:
    """Let a node compute the text, which is in no cache."""
    handoff_id = HandoffId(f"vllm-check.{secrets.token_hex(8)}", 1)
    request = EngineRequest(
        node_request_id(handoff_id),
        tuple(token_ids),
        SamplingParams(
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            logprobs=NUM_TOP,
            prompt_logprobs=0 if kv is None else None,
        ),
        seed=0,
        cache_salt=secrets.token_hex(8),
        kv_hints=RELEASED,
        foreign_kv=kv,
    )
    answer = _Answer()
    await node_calls.call(Leg(LegKind.DECODE, node), request, answer.take, timeout_s=CHECK_S)
    return answer


def mean_apart(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """Return the mean difference of two texts' logprobs. Raises ServerFailed."""
    if not ours or len(theirs) != len(ours):
        raise ServerFailed(f"it gave {len(theirs)} logprobs of a text for {len(ours)} of the node")
    return fmean(abs(their - our) for their, our in zip(theirs, ours, strict=True))


def next_tokens_apart(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float:
    """Return the mean difference of logprobs; a token that one lacks is below the others there."""
    if not ours or not theirs:
        raise ServerFailed("the node gave no logprobs of a token")
    lowest = min(theirs.values())
    return fmean(abs(logprob - theirs.get(token, lowest)) for token, logprob in ours.items())


def _prompt_logprobs(answer: Mapping[str, Any], token_ids: Sequence[int]) -> list[float]:
    """Return the logprobs of a text in vLLM's answer. Raises ServerFailed."""
    try:
        entries = answer["choices"][0]["prompt_logprobs"]
        pairs = zip(token_ids, entries, strict=True)
        return [float(entry[str(token)]["logprob"]) for token, entry in pairs if entry]
    except (LookupError, TypeError, ValueError) as error:
        raise ServerFailed(f"its answer has no prompt_logprobs: {error!r}") from None
