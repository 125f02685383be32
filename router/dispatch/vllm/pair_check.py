"""Check of a vLLM server together with a decode node, before the node uses its KV.

vLLM's parameters name a model, not its weights, and a server on a CPU does not say how it packs KV.
So both compute one text, and the node reads the server's KV of it:

- The logprobs of the text must be close: otherwise the weights differ.
- The most likely next tokens must have close logprobs with the server's KV and without:
  otherwise the node takes it for something else.

With SmolLM2-135M in bfloat16 and vLLM 0.32, the text differs by 0.05 on average; with the node's
weights in int8 by 0.10, in int4 by 0.62, and with noise of 3 % in the weights by 0.28. Smaller
changes of the weights pass.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from baton.core.errors import InvalidRequest
from baton.core.foreign_kv import ForeignKv
from baton.core.ids import HandoffId
from baton.core.kv_hints import RELEASED
from baton.core.legs import LegKind
from baton.core.request import EngineRequest
from baton.core.sampling import SamplingParams
from baton.router.dispatch.node_rpcs import LegEvent, LegOutput, NodeCalls
from baton.router.dispatch.vllm.http_api import ServerFailed, VllmApi, ask, kv_of
from baton.router.routing.nodes import Node
from baton.router.routing.policy import Leg
from baton.rpc.messages.calls import node_request_id

CHECK_S = 120.0
NUM_TOP = 20
MAX_TEXT_APART = 0.15  # mean difference of the text's logprobs
MAX_NEXT_APART = 0.3  # mean difference of the next tokens' logprobs
SOURCE = "vllm"  # of loaded tokens


@dataclass(frozen=True, slots=True)
class PairVerdict:
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
