"""State of a request that is kept across its attempts."""

from __future__ import annotations

import secrets

from baton.core.foreign_kv import ForeignKv
from baton.core.ids import HandoffId
from baton.core.media import Picture
from baton.core.request import EngineRequest
from baton.router.answer import AnswerAssembler
from baton.router.context import RequestContext
from baton.router.dispatch.foreign_prefills import ComputedKv
from baton.router.dispatch.quarantine import Suspicion
from baton.router.dispatch.retries import AttemptFailures
from baton.router.routing.nodes import Revision
from baton.router.values import GenerateCall
from baton.rpc.messages.calls import node_request_id

SEED_BITS = 63
# Before the salt of KV that a vLLM server has computed, which differs a little from that of nodes.
# The salt of a client begins with its owner, or with a colon.
VLLM_SALT = "vllm!"
NONCE_BYTES = 8


class DispatchedRequest:
    def __init__(
        self, call: GenerateCall, context: RequestContext, answer: AnswerAssembler
    ) -> None:
        self.call = call
        self.context = context
        self.answer = answer
        seed = call.sampling.seed
        self.seed = secrets.randbits(SEED_BITS) if seed is None else seed
        self.failures = AttemptFailures()
        self.suspicion = Suspicion(context.quarantine_group)
        self.revision = self.pinned_revision
        self.computed: ComputedKv | None = None  # by a vLLM server that this router asked
        # Unique across routers: clients choose request ids, and hand-offs of different requests
        # must not share an id.
        self.own_id = f"{call.request_id}.{secrets.token_hex(NONCE_BYTES)}"

    @property
    def pinned_revision(self) -> Revision | None:
        """Model revision of other answers to the prompt. None: any may begin the answer."""
        placement = self.context.placement
        return None if placement is None else placement.decode.revision

    def to_engine_request(
        self, handoff_id: HandoffId, now: float, pictures: tuple[Picture, ...], *, is_paced: bool
    ) -> EngineRequest:
        """Return the request of an attempt, which continues the answer so far.

        `pictures` are those whose pixels the node that computes the prompt gets.
        """
        call = self.call
        return EngineRequest(
            request_id=node_request_id(handoff_id),
            prompt_token_ids=call.prompt_token_ids,
            sampling=call.sampling,
            seed=self.seed,
            task=call.task,
            age_s=max(0.0, now - self.context.received_s),
            priority=call.priority,
            adapter=call.model.adapter,
            media=call.token_prompt.media,
            pictures=pictures,
            cache_salt=self.cache_salt(handoff_id.attempt),
            tenant=call.tenant or call.cache_salt,
            client=call.client,
            kv_hints=call.kv_hints,
            foreign_kv=self._foreign_kv(now) if handoff_id.attempt == 1 else None,
            prior_output_token_ids=self.answer.token_ids,
            predicted_token_ids=call.predicted_token_ids,
            is_paced=is_paced,
        )

    def cache_salt(self, attempt: int) -> str:
        """Return the salt of an attempt. The first one reads what a vLLM server has computed."""
        salt = self.call.cache_salt
        return salt if self.computed is None or attempt > 1 else f"{VLLM_SALT}{salt}"

    @property
    def has_foreign_kv(self) -> bool:
        return self.call.foreign_kv is not None or self.computed is not None

    def _foreign_kv(self, now: float) -> ForeignKv | None:
        """Return KV for the first attempt. The server then releases it, and reuses the room."""
        return self.call.foreign_kv if self.computed is None else self.computed.aged(now)
