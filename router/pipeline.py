"""Stages of a request in the router: input processing, admission, dispatch to nodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from baton.core.ids import ModelVariant
from baton.core.output import Finish
from baton.router.admission.admission import TrafficByModel
from baton.router.admission.admission_queue import AdmissionQueueConfig
from baton.router.byte_budget import ByteBudget
from baton.router.dispatch.dispatcher import Dispatcher
from baton.router.dispatch.foreign_prefills import ForeignPrefills
from baton.router.dispatch.node_rpcs import NodeCalls
from baton.router.dispatch.retries import DispatchConfig
from baton.router.documents.reader import DocumentReader
from baton.router.input_processing.form_checks import FormChecks
from baton.router.input_processing.input_processor import InputProcessor
from baton.router.input_processing.model_profiles import ModelProfiles
from baton.router.part_readers import FileReading, PartReader, WorkTrace, ignore_bytes, untraced
from baton.router.pictures.plan import ImageSource
from baton.router.pictures.reader import PictureReader
from baton.router.request_scope import RequestContext
from baton.router.routing.node_table import NodeTable
from baton.router.values import AnswerPart, ChatPrompt, GenerateCall, Prompt, TokenChunk
from baton.rpc.errors import Draining, RequestIdInUse, UnsupportedInput


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    admission_queue: AdmissionQueueConfig = field(default_factory=AdmissionQueueConfig)


class Pipeline:
    def __init__(
        self,
        *,
        table: NodeTable,
        node_calls: NodeCalls,
        profiles: ModelProfiles,
        clock: Callable[[], float],
        config: PipelineConfig,
        forms: FormChecks | None = None,
        foreign_prefills: Sequence[ForeignPrefills] = (),
        image_source: ImageSource | None = None,
        takes_prompt_embeds: bool = False,
    ) -> None:
        self.table = table
        self.takes_prompt_embeds = takes_prompt_embeds
        self.byte_budget = ByteBudget()
        self.profiles = profiles
        self.inputs = InputProcessor(table, profiles, forms)
        # Documents first: their pages can become images.
        self._file_readers: Sequence[PartReader[Any]] = (
            DocumentReader(),
            PictureReader(source=image_source),
        )
        self.traffic = TrafficByModel(config.admission_queue, clock)
        self._dispatcher = Dispatcher(
            table=table,
            node_calls=node_calls,
            profiles=profiles,
            clock=clock,
            config=config.dispatch,
            foreign_prefills=foreign_prefills,
        )
        self._ids_in_use: set[tuple[str, bool]] = set()
        self._became_idle = asyncio.Event()
        self._became_idle.set()
        self.is_draining = False

    def handle_nodes_changed(self) -> None:
        """Handle a change of the table: admit up to the new capacity, wake waiting requests."""
        self.traffic.resize(self.table.batch_slots())
        self._dispatcher.wake()

    async def drain(self) -> None:
        """Refuse new requests, and return when all current ones have ended."""
        self.is_draining = True
        await self._became_idle.wait()

    @contextmanager
    def accept(self, request_id: str, *, is_one_of_several: bool = False) -> Iterator[None]:
        """Reserve a request id until the end of the block, which `drain` awaits.

        The id of one of several answers is not one that a client chose, and may be equal to it.
        Raises Draining and RequestIdInUse.
        """
        key = request_id, is_one_of_several
        if self.is_draining:
            raise Draining("this router is shutting down; send the request to another one")
        if key in self._ids_in_use:
            raise RequestIdInUse(f"request id {request_id!r} is in use; choose another")
        self._ids_in_use.add(key)
        self._became_idle.clear()
        try:
            yield
        finally:
            self._ids_in_use.discard(key)
            if not self._ids_in_use:
                self._became_idle.set()

    async def read_files(
        self,
        prompt: Prompt,
        model: ModelVariant,
        client: str,
        hold: Callable[[int], None] = ignore_bytes,
        trace: WorkTrace = untraced,
    ) -> Prompt:
        """Return a prompt with the files of its messages as the model takes them.

        Raises as `PartReader` says, UnknownModel, and NoNodes if nodes must tell which model the
        name means.
        """
        if not isinstance(prompt, ChatPrompt) or not prompt.files:
            return prompt
        self.inputs.check_model(model)
        profile = self.profiles.of(model)
        reading = FileReading(profile.images, client, hold, trace, profile.name or model.name)
        for reader in self._file_readers:
            if files := prompt.parts(reader.kind):
                prompt = prompt.replaced(reader.kind, await reader.read(files, reading))
        for file in prompt.files:
            raise UnsupportedInput(f"{file.where}: this router reads no such files", file.where)
        return prompt

    async def generate(
        self, call: GenerateCall, context: RequestContext
    ) -> AsyncGenerator[AnswerPart, None]:
        """Yield the parts of the answer; the last one is its Finish.

        Closing the generator early cancels the request on all nodes. Use it within `accept`.
        """
        call = await self.inputs.process(call, context)
        traffic = self.traffic.of(call.model)
        answer = self._dispatcher.run(call, context, traffic.retry_budget)
        turn = traffic.admission.turn(call, context)
        async with turn as note_part, aclosing(answer) as parts:
            if context.placement is None:  # the prompt is not that of another answer
                context.note_tokens(len(call.prompt_token_ids))
            async for part in parts:
                note_part(part)
                if isinstance(part, TokenChunk):
                    context.note_tokens(len(part.token_ids))
                if isinstance(part, Finish):
                    yield replace(part, warnings=(*context.warnings, *call.warnings))
                else:
                    yield part
